"""Ranks that do not move are named, with the threads of one process and with real ranks over gloo."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from commands import ROOT, demo_folder, hybrid3d
from hybrid3d.run import watchdog
from hybrid3d.run.watchdog import StackSampler, Standstill, describe_frame
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


def test_a_thread_in_one_call_stands(gate: threading.Event) -> None:
    found = samples(started(gate.wait), 20, limit=0.5)
    assert found[:12] == [None] * 12  # half of the limit twice, as the first half has not seen whether it is one call
    assert found[12:] == [pytest.approx(0.55 + 0.05 * i) for i in range(8)]


def test_a_thread_that_calls_the_same_again_and_again_moves(gate: threading.Event) -> None:
    """As an engine does that waits for its GPU at the same place for each token: it is another call each time."""

    def step() -> None:
        time.sleep(0.1)

    def generate() -> None:
        while not gate.is_set():
            step()

    assert samples(started(generate), 60, limit=0.4) == [None] * 60


def test_a_thread_that_moves_again_does_not_stand(gate: threading.Event) -> None:
    thread = started(gate.wait)
    sampler = StackSampler(thread.ident or 0)
    assert [sampler.sample(1.0, 4.0) is None for _ in range(7)] == [True] * 6 + [False]
    gate.set()
    thread.join()
    assert sampler.sample(1.0, 4.0) is None


def test_a_place_is_that_of_our_code_and_of_what_it_has_called() -> None:
    def frame_in(module: str, called_by: str = "hybrid3d.roles.split.service") -> tuple[str, bool]:
        """Return the place of a function in a module that is called by one in another module."""
        scope = {"__name__": module}
        exec("import sys\ndef inner():\n    return sys._getframe()\n", scope)
        outer = {"__name__": called_by, "inner": scope["inner"]}
        exec("def outer():\n    return inner()\n", outer)
        return describe_frame(outer["outer"]())  # type: ignore[operator]

    where, waits = frame_in("hybrid3d.rewards.pool_client")
    assert where.startswith("hybrid3d.rewards.pool_client.inner:")
    assert not waits  # though the rank serves others
    assert frame_in("hybrid3d.roles.split.connections")[1]
    assert frame_in("torch.distributed.distributed_c10d", "hybrid3d.distributed")[1]
    assert frame_in("hybrid3d.reshard.transport", "hybrid3d.reshard.executor")[1]
    assert frame_in("megatron.core.pipeline_parallel.p2p_communication", "hybrid3d.train.megatron_model")[1]
    assert not frame_in("torch.distributed.checkpoint.filesystem", "hybrid3d.train.checkpoint")[1]
    where, waits = frame_in("socket", "hybrid3d.train.checkpoint")
    assert "hybrid3d.train.checkpoint.outer:2 > socket.inner:3" in where
    assert not waits


def test_the_message_names_those_that_work_and_counts_those_that_wait() -> None:
    works, waits = Standstill("train", "a.write:3", False, 41.0), Standstill("wait", "b.gather:4", True, 39.0)
    assert watchdog._message({1: works, 2: waits, 0: waits}, everyone=True) == (
        "one rank has not moved for 41 s, and 2 wait for others (Python stacks are in all logs):\n"
        "  rank 1: phase train, in a.write:3"
    )
    assert watchdog._message(dict.fromkeys(range(10), waits), everyone=True) == (
        "all ranks have waited for each other for 39 s (Python stacks are in all logs):\n"
        "  ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more: phase wait, in b.gather:4"
    )


@pytest.fixture(scope="module")
def hung(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three ranks of which one does not move for a while, and which then all wait; the limit is 6 seconds."""
    out = tmp_path_factory.mktemp("hung")
    run_ranks(Path(__file__).parent / "jobs" / "hang.py", 3, [str(out)], timeout=120)
    return out


def reports(hung: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (hung / "reports.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.engines
def test_the_rank_that_others_wait_for_is_named_and_those_that_wait_for_each_other_are_too(hung: Path) -> None:
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
    assert len(reports(hung)) == 2


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
def test_a_reward_that_blocks_is_named(demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    events = [json.loads(line) for line in (work / "runs/sleepy/events.jsonl").read_text().splitlines()]
    (found,) = [event for event in events if event["event"] == "standstill"]
    (rank,) = found["ranks"]
    (place,) = (place for place, ranks in found["places"].items() if ranks == [rank])
    assert place.startswith("phase eval, in hybrid3d.rewards.pool_client.ProcessPoolClient.call")
    assert "pool_client.py" in (work / f"runs/sleepy/logs/rank-{rank}.log").read_text()
