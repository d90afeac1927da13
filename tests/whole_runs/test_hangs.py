"""Twenty hangs and slow ranks in real runs: each is named within a minute, with its phase and whom is waited for.

What hangs opens a FIFO, which blocks in the kernel until the test opens its other end: in functions of a rank by a
`sitecustomize`, in the recipe's reward, and in the file that a rank appends its records to. Other ranks are stopped by
a signal in a phase, or skip a collective, so that all wait for each other.
"""

from __future__ import annotations

import json
import os
import re
import signal
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
LIMIT = "10"  # seconds without a move, or a heartbeat

INJECT = """
import os, sys, time
if "RANK" in os.environ and "hybrid3d" in sys.orig_argv:  # not in processes of rewards
    from hybrid3d.watch import heartbeat
    enter, patched, rank = heartbeat.enter_phase, [], os.environ["RANK"]
    instead = {"get_grad_norm_fp32": 1.0, "corrupted_on_any": ()}  # what is returned by a collective that is skipped

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
            if os.path.exists("inject/skip-" + place):
                os.unlink("inject/skip-" + place)
                return instead[name]
            return original(*args, **more)
        setattr(where, name, injected)

    def entered(phase):
        if not patched:  # now all modules are there
            patched.append(phase)
            wrap("hybrid3d.trainer.learner", "Learner", "update")
            wrap("hybrid3d.trainer.learner", "Learner", "make_experience")
            wrap("hybrid3d.rollout.engine", "RolloutEngine", "submit")
            wrap("hybrid3d.sync", "WeightSync", "finish")
            wrap("hybrid3d.reshard.move.executor", "Executor", "_complete")
            wrap("os", "", "fsync")
            wrap("megatron.core.optimizer.optimizer", "", "get_grad_norm_fp32")
            wrap("hybrid3d.sync.session", "", "corrupted_on_any")
        enter(phase)
        if os.path.exists(f"inject/pause-{phase}-{rank}"):
            with open(f"inject/pause-{phase}-{rank}", "w") as file:
                file.write(str(os.getpid()))
            os.rename(f"inject/pause-{phase}-{rank}", f"inject/reached-{rank}")
            time.sleep(5)  # in which the heartbeat tells others of this phase, and the test stops this process
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
    *("debug.placement=consecutive", "optimizer.lr=0", "run.checkpoint_every=0", "sync.bucket_mib=0.125"),
]
SPLIT = [
    "debug.placement=overlap",
    "train.tp=2",
    "train.pp=1",
    "rollout.tp=1",
    "roles.generation.ranks=2",
    "machine.gpus_per_node=2",
]
IN_BUCKET = (
    r"for rank {0} \(bucket \d+ of \d+, "
    r"(a message (from|to)|messages that are lent by|the return of messages by) rank {0}\)"
)
STOPPED = (
    r"rank {} failed: it has not answered for \d+ s, in step \d+, in phase {}: its process \d+ is stopped \(SIGSTOP\); "
    r"ranks? [\d, ]+ waits? for it \(.*, in phase {}\)"
)


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
        awaited: str = "",
    ) -> None:
        """Let a rank block until it is named, and maybe these others; then it goes on.

        Args:
            file: what it appends to, which blocks; otherwise what is blocked is called `place`.
            awaited: a regular expression of what another rank waits for.
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
        waits = next(event["waits"] for event in self.events()[before:] if event["event"] == "standstill")
        print(waits, flush=True)
        assert not awaited or any(re.fullmatch(awaited, text) for text in waits), waits
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

    def stop(self, rank: int, phase: str, says: str) -> None:
        """Stop the process of a rank in a phase, until the run says so, as a regular expression tells."""
        self.wait_for_step()
        reached, output = self.folder / "inject" / f"reached-{rank}", self.folder / "output.txt"
        (self.folder / "inject" / f"pause-{phase}-{rank}").touch()
        self.wait(reached.exists, STEPPED, f"rank {rank} in {phase}")
        time.sleep(3)
        before = len(output.read_text())
        os.kill(int(reached.read_text()), signal.SIGSTOP)
        since = time.monotonic()
        found = self.wait(lambda: re.search(says, output.read_text()[before:]), NAMED, f"{says}: rank {rank}, {phase}")
        self.tell("SIGSTOP", f"rank {rank}, {phase}", since)
        print(found[0], flush=True)

    def skip(self, place: str, rank: int, phase: str) -> None:
        """Let a rank skip a collective, until it is named as the one that the others wait for in it."""
        self.wait_for_step()
        (self.folder / "inject" / f"skip-{rank}-{place}").touch()
        since, others = time.monotonic(), sorted({0, 1, 2, 3} - {rank})

        def found() -> dict[str, Any] | None:
            return next((event for event in self.events() if event["event"] == "standstill"), None)

        event = self.wait(found, NAMED, f"{place}: all ranks wait, and rank {rank} is named")
        self.tell(f"skips: {place}", f"rank {rank}, {phase}", since)
        print(event["waits"], flush=True)
        assert event["ranks"] == [0, 1, 2, 3]
        assert any(r == others and f"phase {phase}, in " in place for place, r in event["places"].items()), event
        assert [r for text, r in event["waits"].items() if text.startswith(f"for rank {rank} (all_")] == [others], event

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
def started(folder: Path, demo: Path, *more: str, limit: str = LIMIT) -> Iterator[HangingRun]:
    """Start a run, and leave none of its processes."""
    demo_folder(folder, demo)
    (folder / "inject").mkdir()
    (folder / "rewards.py").write_text(REWARD)
    (folder / "also").mkdir()
    (folder / "also/sitecustomize.py").write_text(INJECT)
    mark = uuid.uuid4().hex
    path = os.pathsep.join(map(str, (folder / "also", folder, ROOT / "src")))
    command = [sys.executable, "-m", "hybrid3d", "train", str(ROOT / "recipes/demo-cpu.yaml"), "name=hangs"]
    variables = environment(mark, HYBRID3D_HEARTBEAT_SECONDS=limit) | {"PYTHONPATH": path}
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
        run.block("3-RolloutEngine.submit", 3, "generate")
        run.block("1-WeightSync.finish", 1, "sync", awaited=IN_BUCKET.format(1))
        run.block("0-WeightSync.finish", 0, "sync", awaited=IN_BUCKET.format(0))
        run.block("samples", 0, "wait", file=run.run / "samples.jsonl")
        run.block("reward", 0, "generate", also=(2,))  # those that report for their replicas
        run.block("2-os.fsync", 2, "wait")


def test_slow_ranks_and_rewards_of_ranks_that_do_all(demo: Path, tmp_path: Path) -> None:
    with started(tmp_path, demo) as run:
        run.slow_down("1-Learner.update", 1, "train")
        run.slow_down("2-Learner.make_experience", 2, "train")
        run.slow_down("3-RolloutEngine.submit", 3, "generate")
        run.block("metrics", 0, "wait", file=run.run / "metrics.jsonl")
        assert len([event for event in run.events() if event["event"] == "slow_rank"]) == 3  # once each, and no other


@pytest.mark.parametrize(("rank", "phase", "restarts"), [(1, "generate", 0), (2, "train", 1), (3, "sync", 0)])
def test_ranks_that_are_stopped(rank: int, phase: str, restarts: int, demo: Path, tmp_path: Path) -> None:
    """Each is named by one that watches it, with those that wait for it; then all ranks end, and maybe start again."""
    more = ("run.checkpoint_every=1", "run.keep_last=1", f"run.max_restarts={restarts}")
    with started(tmp_path, demo, *more, limit="16") as run:
        run.stop(rank, phase, STOPPED.format(rank, phase, phase))
        if restarts:
            run.wait(lambda: "starting all ranks again" in (tmp_path / "output.txt").read_text(), NAMED, "a restart")
            run.wait_for_step()


def test_rank_that_trains_is_told_by_another_one_that_does(demo: Path, tmp_path: Path) -> None:
    """Ranks that only generate find it too, and none of them ends it before it is told."""
    told = r"rank 0 failed: it has not answered for \d+ s, in step \d+, in phase train: its process \d+ is stopped"
    with started(tmp_path, demo, *SPLIT, limit="16") as run:
        run.stop(0, "train", told)


def test_rank_that_skips_a_collective_in_training(demo: Path, tmp_path: Path) -> None:
    with started(tmp_path, demo) as run:
        run.skip("megatron.core.optimizer.optimizer.get_grad_norm_fp32", 2, "train")


def test_rank_that_skips_a_collective_in_a_sync(demo: Path, tmp_path: Path) -> None:
    with started(tmp_path, demo, "sync.verify=always") as run:
        run.skip("hybrid3d.sync.session.corrupted_on_any", 2, "sync")


def test_hangs_of_ranks_that_only_generate(demo: Path, tmp_path: Path) -> None:
    """In a sync with those that train; and stopped while it generates, so that it is started again."""
    with started(tmp_path, demo, *SPLIT) as run:
        run.block("3-Executor._complete", 3, "sync", awaited=IN_BUCKET.format(3))
        run.stop(3, "advance", r"rank 3 lost: .*; it was in phase advance, and rank 0 waited for it")
