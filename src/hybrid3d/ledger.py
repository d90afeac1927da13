"""How often the ranks that train have been started, and how they ended: what ranks that outlive them read in the store.

Each start has a number, from 0. All of these ranks end when one of them is lost, and the next start has all of them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from hybrid3d.distributed import RANKS_PER_POLL_SECOND, clone_store

POLL_SECONDS = 0.5


class TrainingStarts:
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
