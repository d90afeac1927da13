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


def stood_for(thread: threading.Thread, seconds: float, limit: float = 0.3) -> float | None:
    """Sample a thread for so many seconds; return for how long it stood at last."""
    sampler, found = StackSampler(thread.ident or 0), None
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = sampler.sample(limit)
        time.sleep(0.05)
    return None if found is None else found[1]


def test_a_thread_in_one_call_stands(gate: threading.Event) -> None:
    found = stood_for(started(gate.wait), 1.0)
    assert found is not None
    assert 0.8 < found < 1.1


def test_a_thread_that_calls_the_same_again_and_again_moves(gate: threading.Event) -> None:
    """As an engine does that waits for its GPU at the same place for each token: it is another call each time."""

    def step() -> None:
        time.sleep(0.1)

    def generate() -> None:
        while not gate.is_set():
            step()

    assert stood_for(started(generate), 1.5) is None


def test_a_thread_that_moves_again_does_not_stand(gate: threading.Event) -> None:
    thread, sampler = started(gate.wait), None
    sampler = StackSampler(thread.ident or 0)
    for _ in range(12):
        found = sampler.sample(0.3)
        time.sleep(0.05)
    assert found is not None
    gate.set()
    thread.join()
    assert sampler.sample(0.3) is None


def test_a_place_is_that_of_our_code_and_of_what_it_has_called() -> None:
    def frame_in(module: str, called_by: str = "hybrid3d.roles.split.service") -> tuple[str, bool]:
        """Return the place of a function in a module that is called by one in another module."""
        scope = {"__name__": module}
        exec("import sys\ndef inner():\n    return sys._getframe()\n", scope)
        outer = {"__name__": called_by, "inner": scope["inner"]}
        exec("def outer():\n    return inner()\n", outer)
        found = {}

        def run() -> None:
            frame = outer["outer"]()  # type: ignore[operator]
            found["place"] = describe_frame(frame)

        run()
        return found["place"]

    where, waits = frame_in("hybrid3d.rewards.pool_client")
    assert where.startswith("hybrid3d.rewards.pool_client.inner:")
    assert not waits  # though the rank serves others
    assert frame_in("hybrid3d.roles.split.connections")[1]
    assert frame_in("torch.distributed.distributed_c10d", "hybrid3d.distributed")[1]
    where, waits = frame_in("socket", "hybrid3d.train.checkpoint")
    assert "hybrid3d.train.checkpoint.outer:2 > socket.inner:3" in where
    assert not waits


def test_the_message_names_those_that_work_and_counts_those_that_wait() -> None:
    works, waits = Standstill("train", "a.write:3", False, 41.0), Standstill("wait", "b.gather:4", True, 39.0)
    assert watchdog._message({1: works, 2: waits, 0: waits}, everyone=True) == (
        "one rank has not moved for 41 s, and 2 wait for others (Python stacks are in all logs):\n"
        "  rank 1: phase train, in a.write:3"
    )
    assert watchdog._message(dict.fromkeys(range(10), waits), everyone=True).splitlines() == [
        "all ranks have waited for each other for 39 s (Python stacks are in all logs):",
        *(f"  rank {rank}: phase wait, in b.gather:4" for rank in range(8)),
        "  and 2 more ranks",
    ]


@pytest.fixture(scope="module")
def hung(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three ranks of which one does not move for a while, once in each way; a second is the limit."""
    out = tmp_path_factory.mktemp("hung")
    run_ranks(Path(__file__).parent / "jobs" / "hang.py", 3, [str(out)], timeout=120)
    return out


def reports(hung: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (hung / "reports.jsonl").read_text().splitlines()]


@pytest.mark.engines
def test_the_rank_that_others_wait_for_is_named_and_those_that_wait_for_each_other_are_too(hung: Path) -> None:
    busy, crossed = reports(hung)[:2]
    assert busy["ranks"] == [1]
    assert "rank 1: phase slow-disk, in __main__.write_slowly:" in str(busy["message"])
    assert crossed["ranks"] == [0, 1, 2]
    places = crossed["places"]
    assert isinstance(places, dict)
    assert "broadcast" in places["0"]
    assert "barrier" in places["1"]
    assert len(reports(hung)) == 2


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
    assert "ProcessPoolClient.call" in found["places"][str(rank)]
    assert "phase eval" in found["places"][str(rank)]
    assert "ProcessPoolClient.call" not in found["places"].get(str(1 - rank), "")
    assert "pool_client.py" in (work / f"runs/sleepy/logs/rank-{rank}.log").read_text()
