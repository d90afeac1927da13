"""Tests heartbeats between ranks, with the threads of one process and a store of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from hybrid3d import launch_environment
from hybrid3d.watch import heartbeat
from hybrid3d.watch.heartbeat import Heartbeat, enter_phase

pytestmark = pytest.mark.processes

LIMIT = 3.0  # seconds of silence, longer than a process waits for a busy core
Told = list[tuple[str, object]]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    monkeypatch.setattr(heartbeat, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(launch_environment, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(heartbeat, "_phase", heartbeat.STARTING)
    monkeypatch.setenv("HYBRID3D_HEARTBEAT_SECONDS", str(LIMIT))
    return dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    """Record, in order, what a rank would do about a lost rank."""
    done: Told = []
    monkeypatch.setattr(heartbeat.os, "kill", lambda pid, number: done.append(("kill", (pid, number))))
    monkeypatch.setattr(heartbeat.os, "_exit", lambda code: done.append(("exit", code)))
    return done


@pytest.fixture(autouse=True)
def nothing_beats_on() -> Iterator[None]:
    """Stop all heartbeat threads after a test, before its store is gone."""
    yield
    threads = [thread for thread in threading.enumerate() if thread.name == "heartbeat"]
    for thread in threads:
        thread._target.__self__._stopped.set()  # type: ignore[attr-defined]
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def begin(store: dist.Store, told: Told) -> list[Heartbeat]:
    def tell(rank: int, said: str) -> None:
        told.append(("tell", (rank, said)))

    both = [Heartbeat(store, rank, 2, tell) for rank in range(2)]
    enter_phase("train")
    wait(lambda: all('"train"' in one._last_beat for one in both), 10)
    return both


def wait(holds: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_silence_is_told_before_the_silent_process_is_killed(store: dist.Store, told: Told) -> None:
    """Its death makes the launcher end all ranks, after which no rank could report it."""
    first, second = begin(store, told)
    second._stopped.set()  # silent without a word
    wait(lambda: len(told) >= 3, 5 * LIMIT)
    first.stop()
    (what, (rank, said)), killed, ended = told  # type: ignore[misc]
    assert (what, rank) == ("tell", 1)
    assert "in phase train: its process" in said
    assert killed == ("kill", (os.getpid(), signal.SIGKILL))
    assert ended == ("exit", 1)


def test_silence_that_cannot_be_told_is_acted_upon(
    store: dist.Store, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If reporting fails, as on a full disk, the run must still end."""
    monkeypatch.setattr(threading, "excepthook", lambda args: told.append(("raised", args.exc_type)))
    first, second = begin(store, told)
    first._on_lost = lambda rank, said: os.close(-1)
    second._stopped.set()
    wait(lambda: len(told) >= 3, 5 * LIMIT)
    first.stop()
    assert told == [("kill", (os.getpid(), signal.SIGKILL)), ("exit", 1), ("raised", OSError)]


# A store of its own, on the port that it prints.
STORE = """
import sys, time
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(("agent", "said"), [("True", "the store in its node's torchrun has not"), ("", "it has not")])
def test_store_that_is_gone(
    store: dist.Store, told: Told, agent: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", agent)
    pipe, command = subprocess.PIPE, [sys.executable, "-c", STORE]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as agents:
        assert agents.stdout is not None
        far = dist.TCPStore("127.0.0.1", int(agents.stdout.readline()), None, False, timedelta(seconds=1))
        enter_phase("train")
        second = Heartbeat(far, 1, 2, lambda rank, said: told.append(("tell", (rank, said))))
        wait(lambda: second._answers > 0, 10)
        agents.communicate()
        time.sleep(0.5)  # in which the last beat that it took has been counted
        second._last_beat = '[1, "train", 1, "", "elsewhere", 7]'
        wait(lambda: len(told) >= 2, 30)
    (what, (rank, words)), ended = told  # type: ignore[misc]
    assert (what, rank, ended) == ("tell", 0, ("exit", 1))
    assert words.startswith(said)


def test_connection_that_breaks_is_made_anew(store: dist.Store, told: Told) -> None:
    first, second = begin(store, told)

    class Broken:
        def clone(self) -> dist.Store:
            return store.clone()

        def set(self, key: str, value: str) -> None:
            raise dist.DistNetworkError("Broken pipe")

    second._store = Broken()
    time.sleep(2 * LIMIT)
    for one in (first, second):
        one.stop()
    assert told == []


def test_rank_that_is_over_may_be_silent(store: dist.Store, told: Told) -> None:
    first, second = begin(store, told)
    second.stop()
    assert not any(thread.is_alive() for thread in second._threads)
    enter_phase("train")  # what the other goes on with, in a process of its own
    time.sleep(2 * LIMIT)
    assert told == []
    assert any(thread.is_alive() for thread in first._threads)
    first.stop()


def test_rank_in_start_up_has_longer(store: dist.Store, told: Told) -> None:
    both = [Heartbeat(store, rank, 2, lambda rank, said: told.append(("tell", rank))) for rank in range(2)]
    wait(lambda: all(one._last_beat for one in both), 10)
    both[1]._stopped.set()
    time.sleep(2 * LIMIT)
    both[0].stop()
    assert told == []


def test_run_of_one_rank_has_nobody_to_watch(store: dist.Store, tmp_path: Path) -> None:
    alone = Heartbeat(store, 0, 1, lambda rank, said: pytest.fail(said))
    assert alone._threads == []
    alone.stop()


@pytest.mark.parametrize("is_lost", [True, False])
def test_rank_that_takes_a_silent_one_s_place_is_watched(store: dist.Store, told: Told, is_lost: bool) -> None:
    """Ranks that do not train outlive the only one that does."""
    tell = lambda rank, said: told.append(("tell", rank))  # noqa: E731

    def silent(rank: int, said: str, beat: str) -> bool:
        told.append(("silent", (rank, beat)))
        return is_lost

    enter_phase("train")
    trains = Heartbeat(store, 0, 1, tell, watched=0)
    serves = Heartbeat(store, 3, 1, tell, watched=0, on_silent=silent)
    wait(lambda: '"train"' in serves._last_beat, 10)
    trains._stopped.set()
    wait(lambda: bool(told), 5 * LIMIT)
    lost = serves._last_beat
    next_one = Heartbeat(store, 0, 1, tell, watched=0)
    time.sleep(2 * LIMIT)
    for one in (next_one, serves):
        one.stop()
    assert told == [("silent", (0, lost)), *([("kill", (os.getpid(), signal.SIGKILL))] if is_lost else [])]


def test_single_training_rank_beats_for_those_that_generate(store: dist.Store, told: Told) -> None:
    tell = lambda rank, said: told.append(("tell", rank))  # noqa: E731
    trains, generates = (Heartbeat(store, rank, 1, tell, watched=0) for rank in (0, 3))
    enter_phase("train")
    wait(lambda: generates._last_beat, 10)
    time.sleep(2 * LIMIT)
    for one in (trains, generates):
        one.stop()
    assert told == []
