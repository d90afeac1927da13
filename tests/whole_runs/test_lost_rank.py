"""Tests that a rank that is stopped during a run is reported with its phase within a minute."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from commands import ROOT
from run_ranks import SHARED_MEMORY, environment, kill_marked, left_in_memory, marked

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

STARTED = 400  # seconds in which a run must have come to its second step; generous, because machines are shared
NAMED = 60  # in which a stopped rank must be named

# Every rank says when it enters the phase for the second time, and waits there until it has been stopped, or not.
PAUSE = """
import os, sys, time
if "RANK" in os.environ and "hybrid3d" in sys.orig_argv:  # not in processes of rewards
    from hybrid3d.watch import heartbeat
    enter, seen = heartbeat.enter_phase, []
    def paused(name):
        enter(name)
        if name == os.environ["TEST_PHASE"]:
            seen.append(name)
            if len(seen) == 2:
                open(f"reached-{os.environ['RANK']}", "w").close()
                time.sleep(5)  # in which the thread has told the others of this phase
    heartbeat.enter_phase = paused
"""

SETTINGS = [
    "model.path=model",
    "run.steps=1000",
    "run.eval_every=1000",
    "algorithm.prompts_per_step=4",
    "algorithm.samples_per_prompt=2",
    "train.micro_batch_size=4",
    "rollout.kv_cache_gib=0.0625",
]


@pytest.fixture
def work(demo: Path, tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """Create the folder of a run, and the mark of all its processes."""
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "demo").mkdir()
    for name in ("train", "eval"):
        table = pq.read_table(demo / f"{name}.parquet").slice(0, 20)
        pq.write_table(table, tmp_path / "build" / "demo" / f"{name}.parquet")
    shutil.copytree(demo / "base", tmp_path / "model")
    (tmp_path / "also").mkdir()
    (tmp_path / "also" / "sitecustomize.py").write_text(PAUSE)
    mark = uuid.uuid4().hex
    yield tmp_path, mark
    kill_marked(mark)


def stop_in(phase: str, rank: int, tp: int, work: Path, mark: str) -> tuple[str, float, str]:
    """Run 2 x `tp` ranks, stop one in a phase, and return the output, the seconds until the end and the run's name."""
    variables = {"TEST_PHASE": phase, "PYTHONPATH": f"{work / 'also'}:{environment('')['PYTHONPATH']}"}
    command = [sys.executable, "-m", "hybrid3d", "train", str(ROOT / "recipes/demo-cpu.yaml"), *SETTINGS]
    command += [f"train.tp={tp}", f"rollout.tp={tp}"]
    with open(work / "output.txt", "wb") as out:
        process = subprocess.Popen(command, cwd=work, env=environment(mark, **variables), stdout=out, stderr=out)
    end = time.monotonic() + STARTED
    while not all((work / f"reached-{r}").exists() for r in range(2 * tp)):
        assert process.poll() is None, (work / "output.txt").read_text()
        assert time.monotonic() < end, (work / "output.txt").read_text()
        time.sleep(0.05)
    time.sleep(3)
    started = {pid: found for pid, found in marked(mark).items() if _is_child(pid, process.pid)}
    name = next(found["HYBRID3D_RUN"] for found in started.values() if "RANK" in found)
    pids = {int(found["RANK"]): pid for pid, found in started.items() if "RANK" in found}
    os.kill(pids[rank], signal.SIGSTOP)
    stopped = time.monotonic()
    while "failed" not in (said := (work / "output.txt").read_text()) and process.poll() is None:
        assert time.monotonic() < stopped + 2 * NAMED, said
        time.sleep(0.1)
    after = time.monotonic() - stopped
    assert process.wait(NAMED) == 1
    return (work / "output.txt").read_text(), after, name


def _is_child(pid: int, launcher: int) -> bool:
    return f"PPid:\t{launcher}\n" in Path(f"/proc/{pid}/status").read_text()


def check(phase: str, rank: int, tp: int, work: Path, mark: str) -> None:
    segments = set(SHARED_MEMORY.iterdir())
    said, seconds, name = stop_in(phase, rank, tp, work, mark)
    print(f"rank {rank} in {phase}: named after {seconds:.1f} s")
    assert f"rank {rank} failed: it has not answered for " in said, said
    assert f"in phase {phase}: its process " in said, said
    assert "is stopped (SIGSTOP)" in said, said
    assert said.count("failed:") == 1, said
    assert "Traceback" not in said
    assert seconds < NAMED
    assert marked(mark) == {}
    assert left_in_memory(name, segments) == []


@pytest.mark.slow
def test_rank_that_is_stopped_while_it_trains(work: tuple[Path, str]) -> None:
    check("train", 1, 1, *work)


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["generate", "train", "sync"])
@pytest.mark.parametrize("rank", range(4))
def test_rank_that_is_stopped(phase: str, rank: int, work: tuple[Path, str]) -> None:
    check(phase, rank, 2, *work)
