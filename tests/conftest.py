"""Fixtures that several test modules share; and no engine is imported where no test needs one."""

from __future__ import annotations

import gc
import json
import os
import re
import runpy
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from pyarrow import parquet

from checkpoints import MORE, make_checkpoint
from commands import HELD_OUT, PROBLEMS
from warm_server import check_engines_once, inspect_models_here

ROOT = Path(__file__).resolve().parent.parent
ENGINES = ("megatron.core", "vllm")
collect_ignore = ["gpu"]  # the checks of `make gpu-check`, each a process of its own
RECORDED = Path(__file__).with_name("seconds.json")  # how long each file took when it was measured last
MIN_SECONDS = 5.0  # files that take fewer are left out


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-seconds", action="store_true", help=f"write how long each file takes to {RECORDED.name}")


def pytest_configure(config: pytest.Config) -> None:
    """Count seconds if asked to, and let no test ignore signals, as it does under nohup or in a script's background."""
    if config.option.record_seconds and "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(Seconds())
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Iterator[None]:
    """Let garbage collections visit what the tests make, and no module."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_sessionfinish() -> None:
    """Let no garbage collection visit what ends with this process."""
    gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort the files that take longest to the front, so that none of them is left alone for the end.

    Tests of the families in `MORE` are marked as slow. Where those marked `further` are left out, a third of the
    examples is drawn.
    """
    if "not further" in config.option.markexpr:
        for test in {item.obj for item in items if getattr(getattr(item, "obj", None), "is_hypothesis_test", False)}:
            draw_a_third(test)
    for item in items:
        family = getattr(item, "callspec", None) and item.callspec.params.get("family")
        if family in MORE and item.get_closest_marker("engines") and item.path.stem not in MORE[family]:
            item.add_marker(pytest.mark.slow)
    seconds = json.loads(RECORDED.read_text())
    items.sort(key=lambda item: -seconds.get(item.nodeid.partition("::")[0], 0.0))


def draw_a_third(test: Any) -> None:
    """Let a test draw a third of its examples. Hypothesis has no public name for a test's settings."""
    from hypothesis import settings

    of_test = test._hypothesis_internal_use_settings or settings()
    test._hypothesis_internal_use_settings = settings(of_test, max_examples=-(-of_test.max_examples // 3))


class Seconds:
    """Counts how long the tests of each file take, and writes it at the end; other files keep what was recorded."""

    def __init__(self) -> None:
        self._of_file: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = report.nodeid.partition("::")[0]
        self._of_file[file] = self._of_file.get(file, 0.0) + report.duration

    def pytest_sessionfinish(self) -> None:
        recorded = {
            file: seconds for file, seconds in json.loads(RECORDED.read_text()).items() if (ROOT / file).exists()
        }
        longest = sorted({**recorded, **self._of_file}.items(), key=lambda one: -one[1])
        told = {file: round(seconds) for file, seconds in longest if seconds >= MIN_SECONDS}
        RECORDED.write_text(json.dumps(told, indent=2) + "\n")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files all of whose tests need an engine, which they import, where such tests are deselected."""
    needs = re.compile(r"^pytestmark = .*pytest\.mark\.engines\b", re.MULTILINE)
    if "not engines" in config.option.markexpr and collection_path.suffix == ".py":
        return True if needs.search(collection_path.read_text()) else None
    return None


@pytest.fixture(scope="session", autouse=True)
def no_engine_imported(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a run of the tests without engines if one was imported all the same."""
    yield
    imported = [name for name in ENGINES if name in sys.modules]
    if imported and "not engines" in request.config.option.markexpr:
        pytest.fail(f"a test that is not marked `engines` has imported {', '.join(imported)}")


@pytest.fixture(scope="session", autouse=True)
def what_stays_is_found_out_once() -> None:
    """Let commands in this process compare the engines' sources once, and vLLM inspect models in it.

    vLLM sets up logging with its first engine, which ends all handlers of logs. One of them closes the stream that was
    standard error when it was made, unless it is that now, as here: within `capfd` it is another one.
    """
    check_engines_once()
    inspect_models_here()
    if "vllm.config" in sys.modules:
        from vllm.config import LoggingConfig
        from vllm.logger import configure_logging_if_needed

        configure_logging_if_needed(LoggingConfig())


@pytest.fixture(scope="session", autouse=True)
def temporary_files(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Give each of several test processes a folder of its own for temporary files, which some tests count."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        os.environ["TMPDIR"] = tempfile.tempdir = str(tmp_path_factory.mktemp("t"))


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny_checkpoint(family, seed=1)`: the folder of a tiny checkpoint, written once a session."""
    root, made = tmp_path_factory.mktemp("checkpoints"), {}

    def folder_of(family: str, seed: int = 1) -> Path:
        if (family, seed) not in made:
            made[family, seed] = make_checkpoint(root / f"{family}-{seed}", family, seed)
        return made[family, seed]

    return folder_of


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo task as `make demo` makes it: `base/` (Qwen2 and its tokenizer) and parquet files.

    Of the 4,096 problems, which each rank reads, it has `PROBLEMS`, and of the 256 held-out ones, which most runs
    answer twice, `HELD_OUT`.
    """
    folder, script = tmp_path_factory.mktemp("demo"), ROOT / "examples" / "make_demo.py"
    with patch.object(sys, "argv", [str(script), str(folder)]), redirect_stdout(StringIO()):
        runpy.run_path(str(script), run_name="__main__")  # in this process, which has to import the same anyway
    for name, rows in (("train", PROBLEMS), ("eval", HELD_OUT)):
        parquet.write_table(parquet.read_table(folder / f"{name}.parquet").slice(0, rows), folder / f"{name}.parquet")
    return folder


@pytest.fixture
def alone() -> Iterator[dist.ProcessGroup]:
    """A process group of this process only."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """A matrix product adds up in the ranks' order only if as many threads share it, and small tensors need no more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
