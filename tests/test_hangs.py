"""Hangs and slow ranks in real runs: each is named within a minute, with its rank and phase.

What hangs opens a FIFO, which blocks in the kernel until the test opens its other end: in functions of a rank by a
`sitecustomize`, in the recipe's reward, and in the file that a rank appends its records to.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from commands import ROOT, demo_folder
from run_ranks import environment, kill_marked

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(1800)]

NAMED = 60  # seconds in which each must be named
STEPPED = 300  # in which a run must do a step or start again; generous, because machines are shared
LIMIT = "6"  # seconds without a move, or a heartbeat

INJECT = """
import os, sys, time
if "RANK" in os.environ and "hybrid3d" in sys.orig_argv:  # not in processes of rewards
    from hybrid3d.run import heartbeat
    enter, patched, rank = heartbeat.enter_phase, [], os.environ["RANK"]

    def wrap(module, owner, name):
        where = sys.modules.get(module)
        where = getattr(where, owner) if owner and where else where
        if where is None:
            return
        original = getattr(where, name)
        def injected(*args, **more):
            place = f"{rank}-{owner or module}.{name}"
            if os.path.exists("inject/block-" + place):
                os.close(os.open("inject/block-" + place, os.O_RDONLY))
            if os.path.exists("inject/slow-" + place):
                time.sleep(2.0)
            return original(*args, **more)
        setattr(where, name, injected)

    def entered(phase):
        if not patched:  # now all modules are there
            patched.append(phase)
            wrap("hybrid3d.roles.learner", "Learner", "update")
            wrap("hybrid3d.roles.learner", "Learner", "make_experience")
            wrap("hybrid3d.rollout.engine", "RolloutEngine", "generate")
            wrap("hybrid3d.roles.weight_sync", "WeightSync", "finish")
            wrap("os", "", "fsync")
        enter(phase)
    heartbeat.enter_phase = entered
"""

REWARD = """
import os

def sometimes(answer, reference, prompt):
    if os.path.exists("inject/block-reward"):
        os.close(os.open("inject/block-reward", os.O_RDONLY))
    return float(len(answer) % 2)
"""

SETTINGS = [
    *("model.path=build/demo/base", "guard.initial_mismatch=ignore", "run.steps=1000", "run.eval_every=1000"),
    *("algorithm.prompts_per_step=4", "algorithm.samples_per_prompt=2", "train.micro_batch_size=4"),
    *("rollout.kv_cache_gib=0.0625", "reward.name=rewards:sometimes", "reward.timeout_seconds=200"),
    *("rollout.placement=consecutive", "optimizer.lr=0", "run.checkpoint_every=0"),
]


class HangingRun:
    """A run in which hangs are injected; when each was named is printed."""

    def __init__(self, folder: Path, mark: str, process: subprocess.Popen[bytes]):
        self.folder, self.run, self.mark, self.process = folder, folder / "runs/hangs", mark, process

    def tell(self, what: str, where: str, since: float) -> None:
        """Print a row of a table: what hung, where, and after how many seconds it was named."""
        print(f"| {what} | {where} | {time.monotonic() - since:.1f} |", flush=True)

    def events(self) -> list[dict[str, Any]]:
        path = self.run / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def steps(self) -> int:
        """Return how many steps were sampled; the file is not there while it is a FIFO's name."""
        path = self.run / "metrics.jsonl"
        return path.read_text().count("\n") if path.is_file() else 0

    def wait(self, condition: Callable[[], Any], seconds: float, what: str) -> Any:
        end = time.monotonic() + seconds
        while not (found := condition()):
            said = (self.folder / "output.txt").read_text()[-3000:]
            assert time.monotonic() < end, f"not within {seconds} s: {what}\n{said}"
            assert self.process.poll() is None, f"ended before: {what}\n{said}"
            time.sleep(0.1)
        return found

    def wait_for_step(self, more: int = 1) -> None:
        before = self.steps()
        self.wait(lambda: self.steps() >= before + more, STEPPED, "a step")

    def block(
        self,
        place: str,
        rank: int,
        phase: str,
        file: Path | None = None,
        also: tuple[int, ...] = (),
    ) -> None:
        """Let a rank block until it is named, and maybe these others; then it goes on.

        Args:
            file: what it appends to, which blocks; otherwise what is blocked is called `place`.
        """
        self.wait_for_step()
        path = file or self.folder / "inject" / f"block-{place}"
        kept = path.with_suffix(".kept")
        if file is not None:
            path.rename(kept)
        before = len(self.events())
        os.mkfifo(path)
        since = time.monotonic()
        self.wait(lambda: self._is_named(before, rank, phase, also), NAMED, f"{place}: rank {rank} in {phase} is named")
        self.tell(f"blocks: {place}", f"rank {rank}, {phase}", since)
        self._release(path, kept if file is not None else None)

    def _is_named(self, before: int, rank: int, phase: str, also: tuple[int, ...]) -> bool:
        """Return whether a rank, or one of `also`, was said to stand in a phase; no other one may be named."""
        for event in self.events()[before:]:
            if event["event"] == "standstill":
                assert set(event["ranks"]) <= {rank, *also}, event
                return any(
                    event["ranks"][0] in r for place, r in event["places"].items() if f"phase {phase}, in " in place
                )
        return False

    def _release(self, path: Path, kept: Path | None) -> None:
        """Remove a FIFO, and let all go on that it blocks."""
        other_end = os.open(path, os.O_NONBLOCK | (os.O_RDONLY if kept else os.O_WRONLY))
        path.unlink()
        if kept is not None:
            kept.rename(path)
            time.sleep(2)  # in which what was blocked is written
        os.close(other_end)

    def slow_down(self, place: str, rank: int, phase: str) -> None:
        """Let a rank be 2 s slower in each step until it is named."""
        self.wait_for_step()
        (self.folder / "inject" / f"slow-{place}").touch()
        since = time.monotonic()

        def found() -> bool:
            return any((e["event"], e.get("rank"), e.get("phase")) == ("slow_rank", rank, phase) for e in self.events())

        self.wait(found, NAMED, f"{place}: rank {rank} is slow in {phase}")
        self.tell(f"slow: {place}", f"rank {rank}, {phase}", since)
        (self.folder / "inject" / f"slow-{place}").unlink()


@contextmanager
def started(folder: Path, demo: Path, *more: str) -> Iterator[HangingRun]:
    """Start a run, and leave none of its processes."""
    demo_folder(folder, demo)
    (folder / "inject").mkdir()
    (folder / "rewards.py").write_text(REWARD)
    (folder / "also").mkdir()
    (folder / "also/sitecustomize.py").write_text(INJECT)
    mark = uuid.uuid4().hex
    path = os.pathsep.join(map(str, (folder / "also", folder, ROOT / "src")))
    command = [sys.executable, "-m", "hybrid3d", "train", str(ROOT / "recipes/demo-cpu.yaml"), "name=hangs"]
    variables = environment(mark, HYBRID3D_HEARTBEAT_SECONDS=LIMIT) | {"PYTHONPATH": path}
    with open(folder / "output.txt", "wb") as out:
        process = subprocess.Popen([*command, *SETTINGS, *more], cwd=folder, env=variables, stdout=out, stderr=out)
    run = HangingRun(folder, mark, process)
    try:
        yield run
    finally:
        kill_marked(mark)
        process.wait()


def test_hangs_in_each_phase_of_ranks_that_do_all(demo: Path, tmp_path: Path) -> None:
    with started(tmp_path, demo, "run.checkpoint_every=1", "run.keep_last=1") as run:
        run.block("1-Learner.update", 1, "train")
        run.block("2-Learner.update", 2, "train")
        run.block("3-Learner.make_experience", 3, "train")
        run.block("3-RolloutEngine.generate", 3, "generate")
        run.block("1-WeightSync.finish", 1, "sync")
        run.block("0-WeightSync.finish", 0, "sync")
        run.block("samples", 0, "wait", file=run.run / "samples.jsonl")
        run.block("reward", 0, "generate", also=(2,))  # those that report for their replicas
        run.block("2-os.fsync", 2, "wait")


def test_slow_ranks_and_rewards_of_ranks_that_do_all(demo: Path, tmp_path: Path) -> None:
    with started(tmp_path, demo) as run:
        run.slow_down("1-Learner.update", 1, "train")
        run.slow_down("2-Learner.make_experience", 2, "train")
        run.slow_down("3-RolloutEngine.generate", 3, "generate")
        run.block("metrics", 0, "wait", file=run.run / "metrics.jsonl")
        assert len([event for event in run.events() if event["event"] == "slow_rank"]) == 3  # once each, and no other
