"""Tests failing runs: a rank is killed, a rank raises, the launcher is killed or interrupted."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

import warm_python
from run_ranks import SHARED_MEMORY, environment, kill_marked, left_in_memory, marked

pytestmark = pytest.mark.engines

SECONDS = 60  # in which a rank that dies takes the others down
STARTED = 180  # seconds in which a run must have trained for two steps; generous, because machines are shared

# Rank 1 finds nothing but an error where its data of step 3 should be.
BOOM = """
import os, sys
if os.environ.get("RANK") == "1" and "hybrid3d" in sys.orig_argv:  # not in processes of rewards
    from hybrid3d.rl.data import PromptData
    batch = PromptData.batch
    def boom(self, step, n):
        if step == 3:
            raise ValueError("boom")
        return batch(self, step, n)
    PromptData.batch = boom
"""


class Run:
    """A process of `hybrid3d train` with a recipe that would take days, and its ranks.

    Args:
        python: `warm_python.executable()` where none of its processes is killed. Of warm ones, clients are looked for.
    """

    def __init__(self, folder: Path, tp: int, pp: int, python: str, variables: dict[str, str]):
        self.mark, self.folder, self.count = uuid.uuid4().hex, folder, tp * pp
        self.segments, self.name = set(SHARED_MEMORY.iterdir()), "of no run yet"
        self.output = folder / "output.txt"
        command = [python, "-m", "hybrid3d", "train", "recipe.yaml", f"train.tp={tp}", f"train.pp={pp}"]
        with open(self.output, "wb") as out:
            self.process = subprocess.Popen(
                command, cwd=folder, env=environment(self.mark, **variables), stdout=out, stderr=out
            )

    def ranks(self) -> dict[int, tuple[int, str]]:
        """Return the pid of each rank, and the name of the run's shared memory."""
        found: dict[int, tuple[int, str]] = {}
        for pid, variables in sorted(marked(self.mark).items()):  # a rank has started before what it starts
            if "RANK" in variables:
                found.setdefault(int(variables["RANK"]), (pid, variables["HYBRID3D_RUN"]))
        return found

    def wait_until_it_trains(self) -> dict[int, tuple[int, str]]:
        metrics = self.folder / "runs" / "long" / "metrics.jsonl"
        self.wait_until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 2, STARTED)
        ranks = self.ranks()
        assert sorted(ranks) == list(range(self.count))
        self.name = ranks[0][1]
        # what vLLM would have here, and what nobody removes when processes are killed
        (SHARED_MEMORY / f"psm_{ranks[0][1]}_7e57").write_bytes(b"1")
        return ranks

    def wait_until(self, holds: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < end, f"still waiting after {seconds} s\n{self.output.read_text()}"
            time.sleep(0.1)

    def end(self) -> str:
        """Wait for the launcher, check that it reports the failure and cleans up, and return its output."""
        assert self.process.wait(SECONDS) == 1
        assert marked(self.mark) == {}
        assert left_in_memory(self.name, self.segments) == []
        output = self.output.read_text()
        assert "Traceback" not in output
        return output


Start = Callable[..., Run]


@pytest.fixture
def start(demo: Path, tmp_path: Path) -> Iterator[Start]:
    shutil.copytree(demo / "base", tmp_path / "model")
    pq.write_table(pq.read_table(demo / "train.parquet").slice(0, 20), tmp_path / "data.parquet")
    recipe = {
        "name": "long",
        "model": {"path": "model"},
        "train": {"micro_batch_size": 4},
        "data": {"train": "data.parquet", "eval": "data.parquet"},
        "algorithm": {"name": "sft", "prompts_per_step": 8},
        "optimizer": {"lr": 1.0e-4},
        "run": {"steps": 1_000_000},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    runs = []

    def begin(tp: int = 1, pp: int = 2, python: str = sys.executable, **variables: str) -> Run:
        runs.append(Run(tmp_path, tp, pp, python, variables))
        return runs[-1]

    yield begin
    for run in runs:
        kill_marked(run.mark)
        run.process.wait()
        for segment in SHARED_MEMORY.glob("psm_hybrid3d-*_7e57"):
            segment.unlink()


def test_rank_that_is_killed(start: Start) -> None:
    run = start()
    ranks = run.wait_until_it_trains()
    os.kill(ranks[1][0], signal.SIGKILL)
    output = run.end()
    assert "rank 1 failed: killed by SIGKILL" in output
    assert str(Path("runs/long/logs/rank-1.log")) in output
    assert output.count("failed:") == 1


def test_rank_that_raises(start: Start, tmp_path: Path) -> None:
    (tmp_path / "boom").mkdir()
    (tmp_path / "boom" / "sitecustomize.py").write_text(BOOM)
    paths = f"{tmp_path / 'boom'}:{environment('')['PYTHONPATH']}"
    run = start(python=warm_python.executable(), PYTHONPATH=paths)
    run.wait_until(lambda: "boom" in run.output.read_text() or run.process.poll() is not None, STARTED)
    output = run.end()
    assert "rank 1 failed: ValueError: boom" in output
    assert output.count("failed:") == 1
    assert "closed by peer" not in output
    assert 'raise ValueError("boom")' in (tmp_path / "runs/long/logs/rank-1.log").read_text()


def test_launcher_that_is_killed(start: Start) -> None:
    run = start(tp=2, pp=1)
    run.wait_until_it_trains()
    run.process.kill()
    run.process.wait()
    run.wait_until(lambda: not marked(run.mark), 10)
    assert left_in_memory(run.name, run.segments) == []


def test_launcher_that_is_interrupted(start: Start) -> None:
    """It is interrupted by Ctrl-C."""
    run = start(tp=2, pp=1, python=warm_python.executable())
    run.wait_until_it_trains()
    run.process.send_signal(signal.SIGINT)
    assert "stopped by SIGINT" in run.end()
