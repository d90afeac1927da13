"""A rank that generates, where other ranks train: it does what the first of those tells it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch.distributed as dist

from hybrid3d import distributed
from hybrid3d.config import Recipe
from hybrid3d.generation.partial_rollout import Prompt
from hybrid3d.generation.replicas import EngineReplicas, Work
from hybrid3d.inputs.models import read_tokenizer
from hybrid3d.launch_environment import DISCONNECTED, State
from hybrid3d.process import engine_name, remove_shared_memory, set_shared_memory_prefix
from hybrid3d.rewards import sandbox
from hybrid3d.roles.split.connections import Connection, Disconnected, connect, has_ended
from hybrid3d.roles.split.elastic_sync import ElasticSync, Members
from hybrid3d.roles.split.messages import Call, End, Join, Joined, Leave, Leaving, Register, Reply
from hybrid3d.roles.weight_sync import WeightSync
from hybrid3d.rollout.engine import RolloutEngine
from hybrid3d.run.heartbeat import enter_phase
from hybrid3d.run.metrics import StepMetrics
from hybrid3d.train.runtime import peak_memory

CLOSE_SECONDS = 60.0  # within which an engine has shut down
ACTIVITIES = {"sync": "sync", "answer": "generate", "advance": "generate"}


class GenerationRank:
    """One rank of an engine.

    An engine is the ranks of `rollout.tp` x `rollout.dp`, and what is lost together: its ranks have process groups of
    their own, apart from those of the syncs.
    """

    def __init__(self, recipe: Recipe, store: dist.Store, ranks: range, restart_count: int, connection: Connection):
        """
        Args:
            ranks: those of its engine.
            restart_count: how many times the engine was started before.
            connection: to the first rank that trains.
        """
        run = distributed.run_id()
        if restart_count:
            remove_shared_memory(engine_name(run, ranks.start, restart_count - 1))
        name = engine_name(run, ranks.start, restart_count)
        set_shared_memory_prefix(name)
        group = distributed.start_among(ranks, f"engine/{ranks.start}/{restart_count}", store)
        self._connection, self._leads = connection, group.rank() == 0
        self._engine = RolloutEngine(recipe, group.rank(), name, range(len(ranks)))
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
        stop = self._connection.has_message if stoppable else None
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
    """Who is told what state this process has reached."""

    @property
    def failure(self) -> str:
        """Why the process of this rank before this one ended; empty if this is the first."""
        ...

    def tell(self, state: State) -> None: ...


def serve(recipe: Recipe, store: dist.Store, progress: Progress) -> None:
    """Start this rank's engine once all of its ranks have registered, and do what the first rank that trains asks.

    Raises:
        Disconnected: the first rank that trains does not answer.
    """
    connection = connect(store)
    if connection is None:
        progress.tell(State.ENDING)
        return
    rank, rollout = distributed.rank(), recipe.rollout
    assert rollout is not None, "checked when the recipe was read"
    asked_to_exit, for_thread = False, store.clone()

    def on_disconnect() -> None:
        """Exit, as the main thread may be waiting for a rank that is lost."""
        if not asked_to_exit:
            with suppress(dist.DistError):
                if has_ended(for_thread):
                    progress.tell(State.ENDING)
            os._exit(DISCONNECTED)

    try:
        confined_by = sandbox.protection() if recipe.reward.name == "code" else None
        connection.send(Register(rank, progress.failure, confined_by))
        progress.tell(State.CONNECTED)
        connection.on_disconnect(on_disconnect)
        join: Join = connection.receive()
        size, first = rollout.tp * rollout.dp, recipe.role_ranks["generation"].start
        start = first + (rank - first) // size * size
        served = GenerationRank(recipe, store, range(start, start + size), join.restart_count, connection)
        connection.send(Joined())
        while not isinstance(message := connection.receive(), Leave | End):
            if isinstance(message, Call):
                had_weights = served.has_synced
                connection.send(served.call(message))
                if served.has_synced and not had_weights:
                    progress.tell(State.READY)
    except Disconnected:
        on_disconnect()
        raise
    asked_to_exit = True
    progress.tell(State.LEAVING if isinstance(message, Leave) else State.ENDING)
    late = threading.Timer(CLOSE_SECONDS, os._exit, [1])  # where another rank of the engine is lost meanwhile
    late.daemon = True
    late.start()
    with suppress(Disconnected):
        connection.send(Leaving())
    served.close()
