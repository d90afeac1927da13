"""Runs each check of a GPU in a process of its own, with a time limit, and prints a line of JSON as it ends.

    make gpu-check ARGS="--only NAME --json OUT"

What a check measures is in its `record`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from gpu.machine import Machine, in_subprocess
from gpu.record import Record
from hybrid3d.cli.terminal import why_unwritable
from hybrid3d.process import kill_descendants_on_exit

ROOT = Path(__file__).resolve().parents[2]
TIMES_AS_LONG = {"cuda": 1, "cpu": 3}  # the limits, on a machine that may do other work, too
PROBE_SECONDS = 120.0
OUTPUT_LINES = 20  # of a failed check's output, in its result
# Of a process that is a rank: a check is none, and starts its own ranks if it needs them
RANK_VARIABLES = ("RANK", "LOCAL_", "GROUP_", "ROLE_", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_", "HYBRID3D_")
STATUSES = ("passed", "failed", "skipped")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("gpu")
    group.addoption("--device", choices=("cuda", "cpu"), default="cuda", help="cpu is a stand-in")
    group.addoption("--only", action="append", default=[], metavar="NAME", help="only this check; may be repeated")
    group.addoption("--json", type=Path, metavar="OUT", help="write all results to this file, after each check")
    group.addoption("--total-seconds", type=float, default=1200.0, help="the limit of all checks together")
    group.addoption("--own-process", type=Path, metavar="RECORD", help="run the check here; used by its process")


def pytest_configure(config: pytest.Config) -> None:
    out = config.getoption("--json")
    problem = "" if out is None else why_unwritable(out)
    if problem:
        raise pytest.UsageError(f"--json {out} ({problem}): name a file in a folder that exists")
    own = config.getoption("--own-process")
    config.pluginmanager.register(Checks(config) if own is None else OwnProcess(Record(own)))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the checks that were asked for."""
    checks, only = {name_of(item): item for item in items}, config.getoption("--only")
    unknown = [name for name in only if name not in checks]
    if unknown:
        raise pytest.UsageError(f"--only {unknown[0]}: there is no such check; there are {', '.join(checks)}")
    items[:] = [item for item in items if not only or name_of(item) in only]


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Record:
    return Record(request.config.getoption("--own-process"))


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    found: str = request.config.getoption("--device")
    return found


def name_of(item: pytest.Item) -> str:
    """Return the name of a check: `overlap` of `test_gpu[overlap]`, or of `test_overlap`."""
    callspec = getattr(item, "callspec", None)
    return item.name.removeprefix("test_") if callspec is None else str(callspec.id)


def needs_of(item: pytest.Item) -> list[str]:
    """Return what a check needs."""
    return [need for mark in item.iter_markers("needs") for need in mark.args]


class OwnProcess:
    """Runs one check in this process, and writes how it ended."""

    def __init__(self, record: Record):
        self._record = record

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        if call.excinfo is None:
            if call.when != "call":
                return
            self._record.end("passed")
        elif call.excinfo.errisinstance(pytest.skip.Exception):
            self._record.end("skipped", str(call.excinfo.value))
        else:
            error = call.excinfo.value
            print(item.repr_failure(call.excinfo))
            said = (str(error).strip().splitlines() or [""])[0]
            self._record.end("failed", said if isinstance(error, AssertionError) else f"{type(error).__name__}: {said}")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # the threads of a failed check's process groups would wait for each other


class Interrupted(BaseException):
    """Raised by a signal that ends the run: what is done is still reported."""


class Checks:
    """Runs checks one after another, each in a process, and reports them as one JSON object."""

    def __init__(self, config: pytest.Config):
        self._config, self._device, self._out = config, config.getoption("--device"), config.getoption("--json")
        self._longer = TIMES_AS_LONG[self._device]
        self._total = config.getoption("--total-seconds") * self._longer
        self._started, self._stopped = time.monotonic(), ""
        self._report: dict[str, Any] = {}

    @pytest.hookimpl
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Find out what is here."""
        if session.items and not self._config.option.collectonly:
            self._environment = environment(self._device)
            self._machine = in_subprocess(self._environment, PROBE_SECONDS)
            self._report = {"device": self._device, "machine": asdict(self._machine), "checks": []}
            self._print({"machine": self._report["machine"]})

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool:
        began, left = time.monotonic(), self._total - (time.monotonic() - self._started)
        reason = missing(item, self._machine, self._device) or self._stopped
        if not reason and left <= 0:
            reason = f"not run: the time limit of all checks, {self._total:g} s, was reached"
        result: dict[str, Any] = {"check": name_of(item), "status": "skipped", "reason": reason}
        if not reason:
            (limit,) = next(item.iter_markers("limit")).args
            try:
                with signals_raise():
                    result = run_check(item, self._device, self._environment, min(limit * self._longer, left))
            except Interrupted as signalled:
                self._stopped = f"not run: the run was ended by {signalled}"
                result = {"check": name_of(item), "status": "failed", "reason": f"ended by {signalled}"}
        self._print(result)
        results = self._report["checks"]
        results.append(result)
        counts = Counter(one["status"] for one in results)
        self._report |= {status: counts[status] for status in STATUSES}
        self._report["seconds"] = round(time.monotonic() - self._started, 1)
        if self._out is not None:
            self._out.write_text(json.dumps(self._report, indent=2) + "\n", encoding="utf-8")
        said: Any = result.get("reason")
        if result["status"] == "skipped":
            said = (str(item.path), 0, f"Skipped: {said}")
        seconds = time.monotonic() - began
        report = pytest.TestReport(item.nodeid, item.location, {}, result["status"], said, "call", duration=seconds)
        item.ihook.pytest_runtest_logreport(report=report)
        return True

    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str]:
        return report.outcome, "", ""  # each has its line

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        if self._report:
            print(", ".join(f"{self._report.get(status, 0)} {status}" for status in STATUSES))
            print(json.dumps(self._report), flush=True)

    def _print(self, entry: Mapping[str, Any]) -> None:
        terminal: Any = self._config.pluginmanager.get_plugin("terminalreporter")
        terminal.ensure_newline()
        terminal.write_line(json.dumps(entry), flush=True)


def missing(item: pytest.Item, machine: Machine, device: str) -> str:
    """Return what a check needs that is not here; empty if all of it is."""
    needs = needs_of(item)
    if device == "cpu":
        needs = [need for need in needs if need != "2 gpus"]  # two ranks run on one CPU
    else:
        needs = ["cuda", *(need for need in needs if need != "cuda")]
    return machine.missing(needs) or ""


def run_check(item: pytest.Item, device: str, environment: Mapping[str, str], seconds: float) -> dict[str, Any]:
    """Run one check in a process, which is killed with all that it started after `seconds`.

    Returns:
        The result: name, status, seconds, the numbers that it recorded, and for a failure the reason and the end of
        the output.
    """
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hybrid3d-gpu-") as folder, kill_descendants_on_exit():
        file, log, work = (Path(folder) / name for name in ("record.jsonl", "output.log", "work"))
        work.mkdir()
        file.touch()
        command = [sys.executable, "-m", "pytest", "-c", str(item.config.inipath), "-s", f"{item.path}::{item.name}"]
        (changes,) = [mark.kwargs for mark in item.iter_markers("variables")] or [{}]
        variables = {key: value for key, value in {**environment, **changes}.items() if value is not None}
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*command, "--device", device, "--own-process", str(file)],
                cwd=work,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            try:
                code: int | None = process.wait(seconds)
            except subprocess.TimeoutExpired:
                code = None
        result = {"check": name_of(item), "seconds": round(time.monotonic() - began, 1), **Record(file).read()}
        tail = log.read_text(errors="replace", encoding="utf-8").splitlines()[-OUTPUT_LINES:]
    if "status" not in result:
        reason = f"still running after {seconds:g} s" if code is None else f"ended with exit code {code}"
        result |= {"status": "failed", "reason": reason}
    if result["status"] == "failed":
        result["output"] = tail
    return result


def environment(device: str) -> dict[str, str]:
    """Return the environment of the processes: these sources, no rank's variables, nothing downloaded."""
    found = {key: value for key, value in os.environ.items() if not key.startswith(RANK_VARIABLES)}
    path = [str(ROOT / "src"), str(ROOT / "tests"), *filter(None, [found.get("PYTHONPATH")]), str(ROOT / "benchmarks")]
    found |= {"PYTHONPATH": os.pathsep.join(path), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    if device == "cpu":
        found["CUDA_VISIBLE_DEVICES"] = ""
    return found


@contextmanager
def signals_raise() -> Iterator[None]:
    """Within the context SIGINT and SIGTERM raise `Interrupted`, so that the check's processes are killed."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Interrupted(signal.Signals(number).name)

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
