"""A rank that generates, where other ranks train: it does what the first of those tells it."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch.distributed as dist

from hybrid3d import distributed
from hybrid3d.config import Recipe
from hybrid3d.generation.partial_rollout import Prompt
from hybrid3d.generation.replicas import EngineReplicas, Work
from hybrid3d.inputs.models import read_tokenizer
from hybrid3d.launch_environment import DISCONNECTED
from hybrid3d.process import remove_shared_memory, set_shared_memory_prefix
from hybrid3d.rewards import sandbox
from hybrid3d.roles.split.connections import Line, connect
from hybrid3d.roles.split.elastic_sync import ElasticSync, Members
from hybrid3d.roles.split.messages import Call, Hello, Join, Joined, Leave, Reply, Stop
from hybrid3d.roles.weight_sync import WeightSync
from hybrid3d.rollout.engine import RolloutEngine
from hybrid3d.run.heartbeat import enter_phase
from hybrid3d.run.metrics import StepMetrics
from hybrid3d.train.runtime import peak_memory

ACTIVITIES = {"sync": "sync", "answer": "generate", "advance": "generate"}


class GenerationRank:
    """One rank of an engine.

    An engine is the ranks of `rollout.tp` x `rollout.dp`, and what is lost together: its ranks have process groups of
    their own, apart from those of the syncs.
    """

    def __init__(self, recipe: Recipe, store: dist.Store, ranks: range, incarnation: int, line: Line):
        """
        Args:
            ranks: those of its engine.
            incarnation: how many times the engine was started before.
            line: to the first rank that trains.
        """
        number = ranks.start // len(ranks)
        name = f"{distributed.run_id()}.engine{number}"
        if incarnation:
            remove_shared_memory(f"{name}.{incarnation - 1}")
        set_shared_memory_prefix(f"{name}.{incarnation}")
        group = distributed.start_among(ranks, f"engine/{ranks.start}/{incarnation}", store)
        self._line, self._leads = line, group.rank() == 0
        self._engine = RolloutEngine(recipe, group.rank(), f"{name}.{incarnation}", range(len(ranks)))
        self._replicas = EngineReplicas(recipe, self._engine, read_tokenizer(recipe), group)

        def make_sync(everyone: dist.ProcessGroup, weights: dist.ProcessGroup, members: tuple[int, ...]) -> WeightSync:
            return WeightSync(recipe, everyone, engine=self._engine, transport_group=weights, ranks=members)

        self._sync = ElasticSync(store, make_sync)
        self.has_synced = False

    def sync(self, members: Members, version: int, verify: bool) -> StepMetrics | None:
        """Sync the weights; return this rank's share of the metrics, or None if a member has been lost."""
        self._sync.begin(members, version, verify)
        self._sync.bucket_ready(0, last=True)
        report = self._sync.finish()
        self.has_synced |= report is not None
        return None if report is None else report.metrics()

    def answer(self, shares: Mapping[int, Sequence[Work]], version: int, temperature: float, scored: bool) -> Any:
        """See `Replicas.answer`."""
        return self._replicas.answer(shares, version, temperature, scored)

    def advance(
        self,
        prompts: Mapping[int, Sequence[Prompt]],
        wanted: Mapping[int, int] | None,
        version: int,
        temperature: float,
        scored: bool,
        stoppable: bool,
    ) -> Any:
        """See `Replicas.advance`; if it is stoppable, until a message has arrived."""
        stop = self._line.has_message if stoppable else None
        return self._replicas.advance(prompts, wanted, version, temperature, scored, stop)

    def call(self, call: Call) -> Reply:
        """Call the method, and return what it returned if this rank reports it."""
        enter_phase(call.method)
        begin = time.time()
        result = getattr(self, call.method)(**call.arguments)
        if call.method != "sync" and not self._leads:
            result = None  # the same as that of the rank that leads
        return Reply(result, [(ACTIVITIES[call.method], begin, time.time())], peak_memory())

    def close(self) -> None:
        """Shut the engine down."""
        self._sync.leave()
        self._replicas.close()
        self._engine.close()  # destroys the groups


class Progress(Protocol):
    """Who is told how far this process has come."""

    @property
    def lost(self) -> str:
        """Why the process of this rank before this one ended; empty if this is the first."""
        ...

    def connected(self) -> None: ...

    def ready(self) -> None:
        """The engine has weights."""
        ...

    def leaving(self) -> None:
        """The engine is not needed for now."""
        ...

    def ending(self) -> None: ...


def serve(recipe: Recipe, store: dist.Store, progress: Progress) -> None:
    """Start this rank's engine once its other ranks are there, and do what the first rank that trains says."""
    line = connect(store)
    done = False

    def end() -> None:
        if not done:  # the main thread may be waiting for a rank that is lost
            os._exit(DISCONNECTED)

    rank, rollout = distributed.rank(), recipe.rollout
    assert rollout is not None, "checked when the recipe was read"
    confined_by = sandbox.protection() if recipe.reward.name == "code" else None
    line.send(Hello(rank, progress.lost, confined_by))
    progress.connected()
    line.when_hung_up(end)
    message = line.receive()
    served: GenerationRank | None = None
    if isinstance(message, Join):
        size, first = rollout.tp * rollout.dp, recipe.role_ranks["generation"].start
        start = first + (rank - first) // size * size
        served = GenerationRank(recipe, store, range(start, start + size), message.incarnation, line)
        line.send(Joined())
        while not isinstance(message := line.receive(), Leave | None):
            if not isinstance(message, Stop):
                ready = served.has_synced
                line.send(served.call(message))
                if served.has_synced > ready:
                    progress.ready()
    done = True
    (progress.leaving if isinstance(message, Leave) else progress.ending)()
    line.send(None)
    if served is not None:
        served.close()
