"""The engines of a run, as the first rank that trains sees them: which take part in syncs, and what they are asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from hybrid3d import ledger
from hybrid3d.config import Recipe
from hybrid3d.generation.engine import Sampling
from hybrid3d.generation.scheduler import Answers, Prompt
from hybrid3d.run.logger import RunLogger
from hybrid3d.run.metrics import StepMetrics
from hybrid3d.scoring.scorer import Query, Scores
from hybrid3d.sync.elastic import Members
from hybrid3d.workers.channel import Connection, Disconnected
from hybrid3d.workers.messages import Advance, Call, Leave, Reply, Score, SyncWeights, WithTexts
from hybrid3d.workers.role_client import RoleClient, WorkerGroup

T = TypeVar("T")


class Engines(RoleClient):
    """Implements `Replicas` for all engines of a run: the groups of the ranks that generate.

    An engine that was lost takes part again from the next sync on after it has been started.
    """

    activity = "generate"

    def __init__(self, recipe: Recipe, store: Store, record: RunLogger):
        super().__init__(recipe, store, record, "generation")
        assert recipe.rollout is not None, "checked when the recipe was read"
        self._per_engine = recipe.rollout.dp
        self._training = tuple(recipe.role_ranks["train"])
        self._active = recipe.active_generation_ranks // self._size
        self._at_start = (recipe.late_ranks.start - recipe.role_ranks["generation"].start) // self._size
        self._epoch = 0
        self._taking_part: list[WorkerGroup] = []  # in the last sync
        self._had_sync = False
        self._syncing: dict[Connection, tuple[WorkerGroup, int]] = {}

    # Which engines take part

    def _lose(self, group: WorkerGroup) -> None:
        was_lost = group.lost
        super()._lose(group)
        if not was_lost and group in self._taking_part:
            with suppress(dist.DistError):  # without the store the run ends
                ledger.tell_lost(self._store, self._epoch)

    def _record_lost(self, group: WorkerGroup, moment: float, ready: int) -> None:
        message = (
            f"{group} lost: {ready} of {self._active} engines can generate, and its ranks are started again, "
            f"at most roles.generation.max_restarts times{group.lost_while}"
        )
        self._record.event("engine_lost", message, ranks=group.ranks, time=moment, phase=group.lost_in)

    def _set_active(self, ranks: int) -> None:
        """Let so many ranks generate: start engines once theirs have registered, or let the last engines go."""
        left = []
        with self._lock:
            self._active = ranks // self._size
            for place, engine in enumerate(self._groups):
                if place < self._active:
                    if engine is None:
                        self._start_if_complete(place)
                elif engine is not None and engine.ready:  # one that is starting goes once it has started
                    engine.lost, self._groups[place] = True, None
                    left.append(engine)
                    for connection in engine.connections.values():
                        with suppress(Disconnected):
                            connection.send(Leave())
        for engine in left:
            message = f"{engine} stopped generating: roles.generation.active_ranks={ranks}"
            self._record.event("engine_left", message, ranks=engine.ranks)

    def members(self, active_ranks: int) -> Members:
        """Return the members of the next sync, of which so many ranks are to generate, after waiting for an engine.

        Before the first sync it waits for all engines, without those that may come late and have not come.
        """
        self._set_active(active_ranks)
        event = "no_engine" if self._had_sync else ""
        while True:
            self._wait_for(self._needed, event, "no rank can generate: waiting for one to come back")
            with self._lock:  # from here on a loss is told to those that take part
                ready = self._ready()
                if len(ready) >= self._needed():
                    before, self._taking_part = self._taking_part, ready
                    if ready != before:
                        self._epoch = ledger.next_epoch(self._store)
                    break
        for engine in self._taking_part:
            if engine in before:
                continue
            if not self._had_sync and engine.kept:
                self._record.event("engine_kept", f"{engine} stayed up", ranks=engine.ranks)
            elif self._had_sync:
                why = "; ".join(engine.failures)
                reason = f" again after it was lost: {why}" if why else ""
                self._record.event("engine_joined", f"{engine} generates{reason}", ranks=engine.ranks, why=why)
        ranks = [rank for engine in self._taking_part for rank in engine.ranks]
        return Members(self._epoch, (*self._training, *ranks), tuple(engine.number for engine in self._taking_part))

    def _needed(self) -> int:
        """Return how many engines the next sync needs; the first one also those that may come late and have come."""
        if self._had_sync:
            return 1
        awaited = min(self._active, self._at_start)
        return awaited + sum(engine is not None for engine in self._groups[awaited : self._active])

    def unchanged(self, active_ranks: int) -> bool:
        """Return whether the engines of the last sync are those of the next one, as far as is known."""
        return active_ranks // self._size == self._active and self._refresh() == self._taking_part

    # The sync

    def begin_sync(self, members: Members, version: int, verify: bool) -> None:
        """Have the engines that are left take part in a sync, which begins."""
        call = SyncWeights(members, version, verify)
        self._syncing = self._send(dict.fromkeys(self._generating(), call))

    def finish_sync(self) -> StepMetrics | None:
        """Return the metrics of all ranks of the engines; None if the sync failed on one that is not lost."""
        metrics, intact = StepMetrics(), True
        for replies in self._receive(self._syncing).values():
            for reply in replies:
                intact &= reply.metrics is not None
                metrics.add_rank(reply.metrics or StepMetrics())
        if intact and not self._had_sync:
            self._record_sandbox()
        self._had_sync |= intact
        return metrics if intact else None

    def fail_sync(self, why: str) -> None:
        """Have the next sync begin with new process groups."""
        with self._lock:
            self._epoch = ledger.next_epoch(self._store)
        self._record.event("sync_failed", why=why, epoch=self._epoch)

    # Generation

    @property
    def numbers(self) -> Sequence[int]:
        """The replicas of the engines that have weights. A replica that is lost never has its number again."""
        return [engine.number * self._per_engine + i for engine in self._generating() for i in range(self._per_engine)]

    def _generating(self) -> list[WorkerGroup]:
        self._refresh()
        return [engine for engine in self._taking_part if engine.ready]

    def advance(
        self,
        prompts: Mapping[int, Sequence[Prompt]],
        wanted: Mapping[int, int] | None,
        version: int,
        sampling: Sampling,
        stop: Callable[[], bool] | None = None,
        apart: bool = False,
    ) -> Mapping[int, Answers]:
        calls: dict[WorkerGroup, Call] = {}
        for engine in self._generating():
            own = None if wanted is None else self._own(engine, wanted)
            of_engine = {number: [*some] for number, some in self._own(engine, prompts).items()}
            calls[engine] = Advance(of_engine, own, version, sampling, apart, stoppable=stop is not None)
        return self._by_replica({engine: reply.whole_answers() for engine, reply in self._first(calls, stop).items()})

    def score(self, shares: Mapping[int, Sequence[Query]]) -> Mapping[int, Scores]:
        calls: dict[WorkerGroup, Call] = {}
        for engine in self._generating():
            calls[engine] = Score({number: WithTexts.of(some) for number, some in self._own(engine, shares).items()})
        return self._by_replica({engine: reply.scores for engine, reply in self._first(calls).items()})

    def _first(
        self, calls: Mapping[WorkerGroup, Call], stop: Callable[[], bool] | None = None
    ) -> dict[WorkerGroup, Reply]:
        """Return the reply of the first rank of each engine to a call, which has the whole result."""
        return {engine: first for engine, (first, *_) in self._receive(self._send(calls), stop).items()}

    def _own(self, engine: WorkerGroup, values: Mapping[int, T]) -> dict[int, T]:
        """Return what is of an engine's replicas, by their numbers in it."""
        k = self._per_engine
        return {number % k: value for number, value in values.items() if number // k == engine.number}

    def _by_replica(self, found: Mapping[WorkerGroup, Mapping[int, T]]) -> dict[int, T]:
        """Return what engines have given for their replicas, by the numbers of these."""
        k = self._per_engine
        return {engine.number * k + i: value for engine, of in found.items() for i, value in of.items()}
