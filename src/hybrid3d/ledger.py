"""The start of a rank, and how often the ranks that train have been started and how they ended, by the store.

Each start has a number, from 0. All of these ranks end when one of them is lost, and the next start has all of them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist
from rich.console import Console
from torch.distributed.distributed_c10d import Store

from hybrid3d.distributed import RANKS_PER_POLL_SECOND, clone_store
from hybrid3d.launch_environment import State

POLL_SECONDS = 0.5


class Progress(Protocol):
    """Who is told what state this process has reached.

    Attributes:
        restart_count: how often the process of this rank was started again before this one.
    """

    @property
    def restart_count(self) -> int: ...

    @property
    def failure(self) -> str:
        """Why the process of this rank before this one ended; empty if this is the first."""
        ...

    def tell(self, state: State) -> None: ...


@dataclass(frozen=True)
class RankStart:
    """What the body of a command gets once the ranks have met.

    Attributes:
        store: the store of the rendezvous.
        console: where rank 0 prints; None on the others.
        progress: is told what state this process reaches.
    """

    rank: int
    store: Store
    console: Console | None
    progress: Progress


class TrainingAttempts:
    """The starts of the ranks that train, in a run in which they are started again.

    Attributes:
        poll_seconds: the time between two reads of the store by each rank.
    """

    def __init__(self, store: Store, world_size: int):
        """
        Args:
            world_size: of all roles.
        """
        self._store = clone_store(store)
        self.poll_seconds = max(POLL_SECONDS, world_size / RANKS_PER_POLL_SECOND)

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
