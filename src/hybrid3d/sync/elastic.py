"""A sync between ranks of which some may be lost, and others join, from one sync to the next."""

from __future__ import annotations

import gc
import logging
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from hybrid3d import ledger
from hybrid3d.distributed import (
    EXCHANGE_TIMEOUT,
    RANKS_PER_POLL_SECOND,
    LostPeer,
    clone_store,
    is_lost_peer,
    spanning_group,
)
from hybrid3d.launch_environment import ANSWER_SECONDS
from hybrid3d.sync.session import Sync, SyncReport

logger = logging.getLogger(__name__)

T = TypeVar("T")

POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Members:
    """The ranks of a sync.

    Attributes:
        epoch: different for each attempt to create process groups of members.
        ranks: those of the launcher that train, and those of the engines that take part.
        engines: a number for each start of an engine that takes part.
    """

    epoch: int
    ranks: tuple[int, ...]
    engines: tuple[int, ...]

    def __bool__(self) -> bool:
        return bool(self.ranks)


NOBODY = Members(-1, (), ())


MakeSync = Callable[[dist.ProcessGroup, dist.ProcessGroup, tuple[int, ...]], Sync]
"""Makes the sync of the ranks of two groups: the one for its collectives, and the one for its transport."""


class ElasticSync:
    """Syncs among members that may change; all members make all calls together, except `leave`.

    Where a member is lost, `finish` returns None on each of the others, sooner or later: a rank that notices it leaves
    its process groups, which those that wait for this rank notice in turn. Then they begin again without the lost one.
    With NCCL nobody would notice: its groups are aborted once `ledger.tell_lost` has been called.

    Attributes:
        members: of the sync in progress, or of the last one; `NOBODY` if one of them has been lost.
        failure: why the last sync that failed did.
    """

    def __init__(self, store: Store, make_sync: MakeSync):
        self._store, self._make_sync = clone_store(store), make_sync
        self._watching: threading.Thread | None = None  # of the last members, on GPUs
        self.members = NOBODY
        self._groups: list[dist.ProcessGroup] = []
        self._syncs: list[Sync] = []  # one once members have met
        self.failure = ""

    def begin(self, members: Members, version: int, verify: bool) -> None:
        """Begin a sync: see `Sync.begin`. With new members everything is planned again, and all is sent.

        Raises: as `plan_sync`.
        """
        if members != self.members:
            self.leave()
            self.members = members
        self._attempt(lambda: self._joined(members).begin(version, verify))

    def _joined(self, members: Members) -> Sync:
        if not self._syncs:
            self._meet(members)
            for name in (f"{members.epoch}/everyone", f"{members.epoch}/weights"):
                self._groups.append(spanning_group(members.ranks, name, self._store, EXCHANGE_TIMEOUT))
            if torch.cuda.is_available():
                self._watching = threading.Thread(
                    target=self._abort_when_lost, args=(members,), name="lost", daemon=True
                )
                self._watching.start()
            self._syncs.append(self._make_sync(self._groups[0], self._groups[1], members.ranks))
        return self._syncs[0]

    def _meet(self, members: Members) -> None:
        """Wait until all members are here, as creating a group with one that is lost takes a minute to fail."""
        pause = max(0.01, len(members.ranks) / RANKS_PER_POLL_SECOND)
        ledger.arrive(self._store, members.epoch)
        while ledger.count_arrived(self._store, members.epoch) < len(members.ranks):
            if ledger.is_lost(self._store, members.epoch):
                raise LostPeer("a rank was lost before all had arrived")
            time.sleep(pause)

    def bucket_ready(self, bucket: int, last: bool) -> None:
        """See `Sync.bucket_ready`; it does nothing once a member has been lost."""
        if self.members:
            self._attempt(lambda: self._syncs[0].bucket_ready(bucket, last))

    def finish(self) -> SyncReport | None:
        """Finish the sync, and return its report; None if a member has been lost. Raises: as `Sync.finish`."""
        return self._attempt(lambda: self._syncs[0].finish()) if self.members else None

    def _abort_when_lost(self, members: Members) -> None:
        """Abort the groups of these members, so that what waits in them fails, once one of the members is lost."""
        store, groups = clone_store(self._store), list(self._groups)
        while self.members == members:
            if ledger.is_lost(store, members.epoch):
                for sync in tuple(self._syncs):  # what it has launched ends without an error
                    sync.interrupt()
                for group in groups:
                    group.abort()
                return
            time.sleep(POLL_SECONDS)

    def interrupt(self) -> None:
        """Let the sync in progress fail, as a member is lost. Any thread may call it."""
        if members := self.members:
            ledger.tell_lost(clone_store(self._store), members.epoch)

    def leave(self) -> None:
        """Leave the process groups of the last members, so that none of them waits for this rank."""
        while self._syncs:
            self._syncs.pop().abandon()
        self.members = NOBODY
        if self._watching:
            self._watching.join(ANSWER_SECONDS)  # it would abort the interpreter if it used the store at its end
        groups, self._groups = self._groups, []
        while groups:
            dist.destroy_process_group(groups.pop())
        gc.collect()  # gloo closes its sockets when the last reference to a group and its operations is gone

    def _attempt(self, work: Callable[[], T]) -> T | None:
        """Return the result of the work, or leave and return None where it fails because a member is lost."""
        try:
            return work()
        except Exception as error:
            if not is_lost_peer(error):
                raise
            self.failure = str(error)
            traceback.clear_frames(error.__traceback__)  # they refer to the groups, and the watchdog may hold them
        logger.warning("a sync failed because a rank was lost: %s", self.failure)
        if torch.cuda.is_available() and self.members:  # the others do not notice that this rank leaves
            ledger.tell_lost(self._store, self.members.epoch)
            for group in self._groups:
                group.abort()
        self.leave()  # not above: the error's traceback refers to the groups, as would the work, if it named them
        return None
