"""Ranks that do not move are named, with the threads of one process and with real ranks over gloo."""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from commands import ROOT, demo_folder, hybrid3d, read_events
from hybrid3d.watch import watchdog
from hybrid3d.watch.stalls import Standstill, Wait, describe_frame, standstill_message, waits_for
from hybrid3d.watch.watchdog import StackSampler
from run_ranks import run_ranks

pytestmark = pytest.mark.processes


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    gate = threading.Event()
    yield gate
    gate.set()


def started(target: object) -> threading.Thread:
    thread = threading.Thread(target=target, daemon=True)  # type: ignore[arg-type]
    thread.start()
    time.sleep(0.1)
    return thread


def samples(thread: threading.Thread, count: int, limit: float) -> list[float | None]:
    """Sample a thread so many times, every 0.05 s; return for how long it stood each time that this is said."""
    sampler, found = StackSampler(thread.ident or 0), []
    for _ in range(count):
        standing = sampler.sample(0.05, limit)
        found.append(None if standing is None else standing[1])
        time.sleep(0.05)
    return found


def test_thread_in_one_call_stands(gate: threading.Event) -> None:
    found = samples(started(gate.wait), 20, limit=0.5)
    assert found[:12] == [None] * 12  # half of the limit twice, as the first half has not seen whether it is one call
    assert found[12:] == [pytest.approx(0.55 + 0.05 * i) for i in range(8)]


def test_thread_that_calls_the_same_again_and_again_moves(gate: threading.Event) -> None:
    """As an engine does that waits for its GPU at the same place for each token: it is another call each time."""

    def step() -> None:
        time.sleep(0.1)

    def generate() -> None:
        while not gate.is_set():
            step()

    assert samples(started(generate), 60, limit=0.4) == [None] * 60


def test_thread_that_moves_again_does_not_stand(gate: threading.Event) -> None:
    thread = started(gate.wait)
    sampler = StackSampler(thread.ident or 0)
    assert [sampler.sample(1.0, 4.0) is None for _ in range(7)] == [True] * 6 + [False]
    gate.set()
    thread.join()
    assert sampler.sample(1.0, 4.0) is None


def test_place_is_that_of_our_code_and_what_it_calls() -> None:
    def frame_in(module: str, called_by: str = "hybrid3d.workers.loop") -> tuple[str, bool]:
        """Return the place of a function in a module that is called by one in another module."""
        scope = {"__name__": module}
        exec("import sys\ndef inner():\n    return sys._getframe()\n", scope)
        outer = {"__name__": called_by, "inner": scope["inner"]}
        exec("def outer():\n    return inner()\n", outer)
        return describe_frame(outer["outer"]())  # type: ignore[operator]

    where, waits = frame_in("hybrid3d.scoring.pool_client")
    assert where.startswith("hybrid3d.scoring.pool_client.inner:")
    assert not waits  # though the rank serves others
    assert frame_in("hybrid3d.workers.channel")[1]
    assert frame_in("torch.distributed.distributed_c10d", "hybrid3d.distributed")[1]
    assert frame_in("hybrid3d.reshard.move.transport", "hybrid3d.reshard.move.executor")[1]
    assert frame_in("megatron.core.pipeline_parallel.p2p_communication", "hybrid3d.train.megatron.model")[1]
    assert not frame_in("torch.distributed.checkpoint.filesystem", "hybrid3d.train.megatron.checkpoint")[1]
    where, waits = frame_in("socket", "hybrid3d.train.megatron.checkpoint")
    assert "hybrid3d.train.megatron.checkpoint.outer:2 > socket.inner:3" in where
    assert not waits


def gather(*ranks: int) -> Wait:
    return Wait("gather", ranks, together=True)


def test_message_names_those_that_work_and_for_whom_others_wait() -> None:
    works = Standstill("train", "a.write:3", False, 41.0, step=7)
    known = {1: works} | {rank: Standstill("wait", "b.gather:4", True, 39.0, 7, gather(0, 1, 2)) for rank in (2, 0)}
    assert standstill_message({1: works}, known, everyone=True) == (
        "one rank has not moved for 41 s, and 2 wait for others (Python stacks are in all logs):\n"
        "  rank 1: step 7, phase train, in a.write:3\n"
        "  ranks 2, 0: step 7, phase wait, in b.gather:4, waiting for rank 1 (gather of ranks 0, 1, 2)"
    )
    unknown = dict.fromkeys(range(10), Standstill("wait", "b.gather:4", True, 39.0))
    assert standstill_message(unknown, unknown, everyone=True) == (
        "all ranks have waited for each other for 39 s (Python stacks are in all logs):\n"
        "  ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more: phase wait, in b.gather:4"
    )


def test_standstill_message_names_bucket_and_other_end_of_its_message() -> None:
    def in_bucket(number: int, rank: int) -> Standstill:
        wait = Wait(f"bucket {number} of 5, a message from rank {rank}", (rank,), together=False)
        return Standstill("sync", "c.wait:5", True, 39.0, 3, wait)

    known = {0: in_bucket(2, 1), 1: in_bucket(2, 3), 3: Standstill("train", "d.step:1", False, 44.0, 2)}
    said = standstill_message({3: known[3]}, known, False, {0: "train", 1: "train", 3: "generation"}.__getitem__)
    assert said.splitlines()[1:] == [
        "  rank 3: generation, step 2, phase train, in d.step:1",
        "  rank 0: train, step 3, phase sync, in c.wait:5, waiting for rank 1 (bucket 2 of 5, a message from rank 1)",
        "  rank 1: train, step 3, phase sync, in c.wait:5, waiting for rank 3 (bucket 2 of 5, a message from rank 3)",
    ]
    assert waits_for(3, known) == "; rank 1 waits for it (bucket 2 of 5, a message from rank 3, in phase sync)"
    assert waits_for(2, known) == ""
    two = known | {2: Standstill("train", "b.f:4", True, 39.0, 3, gather(2, 3))}
    assert waits_for(3, {rank: two[rank] for rank in (0, 1, 2)}) == (
        "; rank 1 waits for it (bucket 2 of 5, a message from rank 3, in phase sync), "
        "rank 2 waits for it (gather of ranks 2, 3, in phase train)"
    )


def test_ranks_in_different_collectives_wait_for_each_other() -> None:
    places = {0: gather(0, 1, 2), 1: gather(0, 1, 2), 2: Wait("barrier", (1, 2), together=True)}
    known = {rank: Standstill("train", "b.f:4", True, 39.0, None, wait) for rank, wait in places.items()}
    assert standstill_message(known, known, True).splitlines()[1:] == [
        "  ranks 0, 1: phase train, in b.f:4, waiting for rank 2 (gather of ranks 0, 1, 2)",
        "  rank 2: phase train, in b.f:4, waiting for rank 1 (barrier of ranks 1, 2)",
    ]


def test_failing_find_wait_does_not_end_the_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(frame: object) -> None:
        raise RuntimeError("dictionary changed size during iteration")

    monkeypatch.setattr(watchdog, "find_wait", broken)
    assert watchdog._find_wait(sys._getframe()) is None


@pytest.fixture(scope="module")
def hung(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three ranks of which one does not move for a while, and which then all wait; the limit is 6 seconds."""
    out = tmp_path_factory.mktemp("hung")
    run_ranks(Path(__file__).parents[1] / "jobs" / "hang.py", 3, [str(out)], timeout=120)
    return out


def reports(hung: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (hung / "reports.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.engines
def test_ranks_that_others_or_each_other_wait_for_are_named(hung: Path) -> None:
    busy, crossed = reports(hung)[:2]
    assert busy["ranks"] == [1]
    assert "rank 1: phase slow-disk, in __main__.write_slowly:" in str(busy["message"])
    assert crossed["ranks"] == [0, 1, 2]
    places = crossed["places"]
    assert isinstance(places, dict)
    by_ranks = {tuple(ranks): place for place, ranks in places.items()}
    assert by_ranks.keys() == {(0,), (1, 2)}
    assert "broadcast" in by_ranks[(0,)]
    assert "barrier" in by_ranks[(1, 2)]
    assert len(reports(hung)) == 3


@pytest.mark.slow
@pytest.mark.engines
def test_deadlock_ends_ranks_but_not_those_awaiting_a_working_one(hung: Path) -> None:
    """Their groups have no limit of their own; rank 1 worked for longer than the limit of a deadlock."""
    ended = reports(hung)[2]
    assert ended["event"] == "deadlock"
    waited = re.match(r"all ranks have waited for each other for (\d+) s", str(ended["message"]))
    assert waited
    assert 9 <= int(waited[1]) < 30


@pytest.mark.slow
@pytest.mark.engines
def test_whom_the_others_wait_for_is_named(hung: Path) -> None:
    """While a rank works the others wait for it; in a crossed call each waits for those in the other call."""
    busy, crossed = reports(hung)[:2]
    assert busy["waits"] == {"for rank 1 (barrier of ranks 0, 1, 2)": [0, 2]}
    assert "ranks 0, 2: phase wait, in torch.distributed" in str(busy["message"])
    assert crossed["waits"] == {
        "for ranks 1, 2 (broadcast of ranks 0, 1, 2)": [0],
        "for rank 0 (barrier of ranks 0, 1, 2)": [1, 2],
    }


@pytest.mark.slow
@pytest.mark.engines
def test_stacks_are_in_the_logs(hung: Path) -> None:
    stacks = [(hung / f"rank-{rank}.stacks").read_text() for rank in range(3)]
    assert "write_slowly" in stacks[1]
    assert all("crossed" in one for one in stacks)
    assert "write_slowly" not in stacks[0]


SLEEPY = """
import os, time

def sleepy(answer, reference, prompt):
    if not os.path.exists("slept"):
        open("slept", "w").close()
        time.sleep(25)
    return float(len(answer) % 2)
"""


@pytest.mark.slow
@pytest.mark.engines
def test_reward_that_blocks_is_named(demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRID3D_HEARTBEAT_SECONDS", "8")
    work = demo_folder(tmp_path, demo)
    (work / "rewards.py").write_text(SLEEPY)
    settings = [
        "model.path=build/demo/base",
        "guard.initial_mismatch=ignore",
        "train.tp=2",
        "train.pp=1",
        "run.steps=1",
    ]
    settings += ["reward.name=rewards:sleepy", "reward.timeout_seconds=60", "name=sleepy"]
    hybrid3d(work, "train", str(ROOT / "recipes/demo-cpu.yaml"), *settings, also=work)
    events = read_events(work / "runs/sleepy")
    (found,) = [event for event in events if event["event"] == "standstill"]
    (rank,) = found["ranks"]
    (place,) = (place for place, ranks in found["places"].items() if ranks == [rank])
    assert place.startswith("phase eval, in hybrid3d.scoring.pool_client.ProcessPoolClient.call")
    assert "pool_client.py" in (work / f"runs/sleepy/logs/rank-{rank}.log").read_text()
