"""What the ranks of a run tell each other by its store: who is alive, waits, was lost, and how starts have ended.

No other module names keys of a store, but `launch/rendezvous.py`, by which the ranks meet; others name stores within
it (`PrefixStore`). What was not told is an empty text, or nothing; where the store is gone, `DistError` is raised.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from rich.console import Console
from torch.distributed.distributed_c10d import Store

from hybrid3d.distributed import RANKS_PER_POLL_SECOND, clone_store
from hybrid3d.process import ChildProcess

POLL_SECONDS = 0.5


@dataclass(frozen=True)
class RankStart:
    """What the body of a command gets once the ranks have met."""

    rank: int
    store: Store  # of the rendezvous
    console: Console | None  # where rank 0 prints; None on the others
    progress: ChildProcess  # is told what state this process reaches


class TrainingAttempts:
    """The starts of the ranks that train, in a run in which they are started again.

    Each start has a number, from 0. All of these ranks end when one of them is lost, and the next start has all of
    them. `world_size` is that of all roles.
    """

    def __init__(self, store: Store, world_size: int):
        self._store = clone_store(store)
        self.poll_seconds = max(POLL_SECONDS, world_size / RANKS_PER_POLL_SECOND)  # between two reads by each rank

    def latest(self) -> int:
        """Return the number of the latest start."""
        return int(self._store.add("starts", 0))

    def fail(self, start: int) -> None:
        """Let all ranks know that one that trains is lost, so that the others end."""
        self._store.set(f"starts/{start}/failed", "")

    def has_failed(self, start: int) -> bool:
        """Return whether a rank of this start is lost."""
        return bool(self._store.check([f"starts/{start}/failed"]))

    def await_failure(self, start: int, seconds: float) -> bool:
        """Wait until a rank of this start is known to be lost, and return whether it is."""
        return self._await(lambda: self.has_failed(start), seconds)

    def report_end(self, start: int, rank: int, exit_code: int) -> None:
        """Report how this rank's process of a start has ended."""
        self._store.set(f"starts/{start}/exit/{rank}", str(exit_code))

    def await_ends(self, start: int, ranks: range, seconds: float) -> dict[int, int]:
        """Return the exit codes of this start's processes by rank, without those that are not reported in time."""
        keys = {rank: f"starts/{start}/exit/{rank}" for rank in ranks}
        self._await(lambda: self._store.check(list(keys.values())), seconds)
        return {rank: int(self._store.get(key)) for rank, key in keys.items() if self._store.check([key])}

    def decide(self, start: int, again: bool) -> None:
        """Let the other ranks know whether there is another start after this one."""
        if again:
            self._store.add("starts", 1)
        self._store.set(f"starts/{start}/again", json.dumps(again))

    def is_there_another(self, start: int, seconds: float) -> bool:
        """Wait for what rank 0 decides; without an answer there is no other start."""
        with suppress(dist.DistError):
            self._store.wait([f"starts/{start}/again"], timedelta(seconds=seconds))
            return bool(json.loads(self._store.get(f"starts/{start}/again")))
        return False

    def _await(self, condition: Callable[[], bool], seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not (met := condition()) and time.monotonic() < end:
            time.sleep(self.poll_seconds)
        return met


# What ranks agree on


def share(store: Store, rank: int, name: str, make: Callable[[], Any], wait: timedelta | None = None) -> Any:
    """Return on every rank what rank 0 makes, as JSON holds it; `wait` is for how long the others do."""
    key = f"shared/{name}"
    if rank == 0:
        store.set(key, json.dumps(make()))
    elif wait is not None:
        store.wait([key], wait)
    return json.loads(store.get(key))


def gather(store: Store, rank: int, ranks: int, name: str, value: Any) -> list[Any]:
    """Return on rank 0 what each rank gives, by rank, as JSON holds it; nothing on the others."""
    store.set(f"gathered/{name}/{rank}", json.dumps(value))
    return [json.loads(store.get(f"gathered/{name}/{other}")) for other in range(ranks)] if rank == 0 else []


def wait_for_all(store: Store, rank: int, ranks: int) -> None:
    """Let rank 0, whose process may have the store, wait until all ranks have shut their engines down."""
    store.set(f"closed/{rank}", "")
    if rank == 0:
        store.wait([f"closed/{other}" for other in range(ranks)])


# Who is alive, and who stands (`watch/`)


def tell_beat(store: Store, rank: int, beat: str) -> None:
    """Tell that a rank is alive, and what it does."""
    store.set(f"beat/{rank}", beat)


def read_beat(store: Store, rank: int) -> str:
    """Return a rank's last beat."""
    return _read(store, f"beat/{rank}")


def forget_beat(store: Store, rank: int) -> None:
    """Let a rank, whose process has ended, be one that has not started."""
    store.set(f"beat/{rank}", "")  # who reads it at this moment would wait for a key that is deleted


def tell_standstill(store: Store, rank: int, standstill: str) -> None:
    """Tell where a rank stands, or with an empty text that it does not."""
    store.set(f"standstill/{rank}", standstill)
    if standstill:
        store.add("standstill/told", 1)


def read_standstill(store: Store, rank: int) -> str:
    """Return where a rank stands."""
    return _read(store, f"standstill/{rank}")


def count_standstills(store: Store) -> int:
    """Return how often ranks have told that they stand."""
    return int(store.add("standstill/told", 0))


def tell_all_stand(store: Store, all_stand: bool) -> None:
    """Tell whether all ranks stand."""
    store.set("standstill/all", "yes" if all_stand else "")


def do_all_stand(store: Store) -> bool:
    """Return whether all ranks stand."""
    return bool(_read(store, "standstill/all"))


def tell_work(store: Store, rank: int, work: str) -> None:
    """Tell what a rank has done in its last steps."""
    store.set(f"work/{rank}", work)


def read_works(store: Store, ranks: Iterable[int]) -> dict[int, str]:
    """Return what ranks have done, by rank, of those that have told."""
    return {rank: work for rank in ranks if (work := _read(store, f"work/{rank}"))}


# Who takes part in a sync (`sync/elastic.py`): an epoch is an attempt to create process groups of its members. In a
# transfer to a vLLM that others serve, an update is one.


def next_epoch(store: Store) -> int:
    """Return the number of a new epoch."""
    return int(store.add("sync/epochs", 1))


def tell_lost(store: Store, epoch: int) -> None:
    """Let the members of this epoch know that one of them is lost."""
    store.set(f"lost/{epoch}", "")


def is_lost(store: Store, epoch: int) -> bool:
    """Return whether a member of this epoch is lost."""
    return bool(store.check([f"lost/{epoch}"]))


def arrive(store: Store, epoch: int) -> None:
    """Tell that one more member has arrived."""
    store.add(f"arrived/{epoch}", 1)


def count_arrived(store: Store, epoch: int) -> int:
    """Return how many members have arrived."""
    return int(store.add(f"arrived/{epoch}", 0))


# Where the ranks that do not train find the first one that does (`workers/`)


def publish_address(store: Store, start: int, host: str, port: int) -> None:
    """Tell where the first rank that trains accepts connections in this start."""
    store.set(f"roles/address/{start}", json.dumps([host, port]))


def read_address(store: Store, start: int) -> tuple[str, int] | None:
    """Return the address of this start."""
    found = _read(store, f"roles/address/{start}")
    if not found:
        return None
    host, port = json.loads(found)
    return str(host), int(port)


def count_start(store: Store, role: str, place: int) -> int:
    """Return the number of a new start of a group of ranks, from 0."""
    return int(store.add(f"{role}/{place}/starts", 1)) - 1


def end_run(store: Store) -> None:
    """Let ranks that are started from now on know that the run has ended."""
    store.set("roles/ended", "")


def has_ended(store: Store) -> bool:
    """Return whether the run has ended."""
    return bool(store.check(["roles/ended"]))


# What the members of a transfer to a vLLM that others serve tell each other, by a store of theirs (`weight_transfer/`)


def open_session(store: Store) -> str:
    """Return the name of a new session, by which its members know each other, and tell it."""
    store.set("session", secrets.token_hex(8))
    return read_session(store)


def read_session(store: Store) -> str:
    """Return the name of the session, after waiting for it."""
    return store.get("session").decode()


def forget_session(store: Store) -> None:
    """Let who connects from now on wait for another session."""
    store.delete_key("session")


def join(store: Store) -> None:
    """Tell that one more member has joined."""
    store.add("joined", 1)


def count_joined(store: Store) -> int:
    """Return how many members have joined."""
    return int(store.add("joined", 0))


def refuse(store: Store, why: str) -> None:
    """Tell why a member cannot take part."""
    store.set("refused", why)


def read_refusal(store: Store) -> str:
    """Return why a member cannot take part."""
    return _read(store, "refused")


def hear_refusal(store: Store) -> None:
    """Tell that one more member knows of the refusal."""
    store.add("told", 1)


def count_told(store: Store) -> int:
    """Return how many members know of the refusal."""
    return int(store.add("told", 0))


def hear_answer(store: Store) -> None:
    """Tell that one more of the trainer's ranks knows that vLLM has done what it was asked for."""
    store.add("heard", 1)


def count_heard(store: Store) -> int:
    """Return how many have told so, over all answers."""
    return int(store.add("heard", 0))


def check_answers(store: Store) -> None:
    """Raise `DistError` if the store is gone."""
    store.check(["alive"])


def _read(store: Store, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""
