"""A rank that generates, where other ranks train: it does what the first of those tells it."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn, Protocol

import torch.distributed as dist

from hybrid3d import distributed
from hybrid3d.config import Recipe
from hybrid3d.generation.replicas import EngineReplicas
from hybrid3d.inputs.models import read_tokenizer
from hybrid3d.launch_environment import DISCONNECTED, State
from hybrid3d.process import engine_name, remove_shared_memory, set_shared_memory_prefix
from hybrid3d.rewards import sandbox
from hybrid3d.roles.split.connections import Connection, Disconnected, connect, has_ended
from hybrid3d.roles.split.elastic_sync import ElasticSync, Members
from hybrid3d.roles.split.messages import Call, End, Join, Joined, Leave, Leaving, Register, Reply
from hybrid3d.roles.split.training_starts import TrainingStarts
from hybrid3d.roles.weight_sync import WeightSync
from hybrid3d.rollout.engine import RolloutEngine
from hybrid3d.run.heartbeat import enter_phase
from hybrid3d.run.metrics import StepMetrics
from hybrid3d.train.runtime import peak_memory

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 60.0  # within which an engine has shut down
FAILED_SECONDS = 10.0  # within which it is known that a rank that trains is lost
BUSY_SECONDS = 600.0  # within which this rank, after it has lost them, has finished what they had asked for
ACTIVITIES = {"sync": "sync", "answer": "generate", "advance": "generate"}


class GenerationRank:
    """One rank of an engine.

    An engine is the ranks of `rollout.tp` x `rollout.dp`, and what is lost together: its ranks have process groups of
    their own, apart from those of the syncs.

    Attributes:
        start: number of the start of the engine.
        has_synced: whether it has had weights.
    """

    def __init__(self, recipe: Recipe, store: dist.Store, ranks: range, start: int):
        """
        Args:
            ranks: those of its engine.
            start: number of this start of the engine.
        """
        run = distributed.run_id()
        if start:
            remove_shared_memory(engine_name(run, ranks.start, start - 1))
        name = engine_name(run, ranks.start, start)
        set_shared_memory_prefix(name)
        group = distributed.start_among(ranks, f"engine/{ranks.start}/{start}", store)
        self.start, self._leads = start, group.rank() == 0
        self._has_message: Callable[[], bool] | None = None
        self._engine = RolloutEngine(recipe, group.rank(), name, range(len(ranks)))
        self._replicas = EngineReplicas(recipe, self._engine, read_tokenizer(recipe), group)

        def make_sync(everyone: dist.ProcessGroup, weights: dist.ProcessGroup, members: tuple[int, ...]) -> WeightSync:
            return WeightSync(recipe, everyone, engine=self._engine, transport_group=weights, ranks=members)

        self._sync = ElasticSync(store, make_sync)
        self.has_synced = False

    def begin(self, connection: Connection) -> None:
        """Begin to serve a start of the ranks that train; what an earlier one has asked for is dropped."""
        self._sync.leave()
        self._replicas.reset()
        self._has_message = connection.has_message

    def interrupt(self) -> None:
        """Let the sync in progress fail. Any thread may call it."""
        self._sync.interrupt()

    def sync(self, members: Members, version: int, verify: bool) -> StepMetrics | None:
        """Sync the weights; return this rank's share of the metrics, or None if a member has been lost."""
        self._sync.begin(members, version, verify)
        self._sync.bucket_ready(0, last=True)
        report = self._sync.finish()
        self.has_synced |= report is not None
        return None if report is None else report.metrics()

    def call(self, call: Call) -> Reply:
        """Call the method, and return what it returned if this rank reports it."""
        enter_phase(call.method)
        begin, result = time.time(), None
        if call.method == "sync":
            result = self.sync(**call.arguments)
        else:
            stop = {"stop": self._has_message} if call.stoppable else {}
            found = getattr(self._replicas, call.method)(**call.arguments, **stop)
            result = found if self._leads else None  # it is the same on all ranks
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

    If the ranks that train are started again, the engine stays up, and is at the service of their next start.

    Raises:
        Disconnected: the first rank that trains does not answer.
    """
    Service(recipe, store, progress).run()


class Service:
    """What a rank that generates does until the end of the run."""

    def __init__(self, recipe: Recipe, store: dist.Store, progress: Progress):
        self._recipe, self._store, self._progress = recipe, store, progress
        self._outlives_training = recipe.run.max_restarts > 0
        self._starts_store = store.clone()  # for threads, too
        self._starts = TrainingStarts(store, distributed.world_size())
        self._rank: GenerationRank | None = None
        self._asked_to_exit = False

    def run(self) -> None:
        """See `serve`."""
        start = self._starts.latest()
        while not self._serve(start):
            start += 1

    def _serve(self, start: int) -> bool:
        """Serve a start of the ranks that train; return False if there is another start."""
        try:
            connection = connect(self._store, start, lambda: self._has_failed(start, 0.0))
        except Disconnected:
            if self._has_failed(start):
                return False
            raise
        if connection is None:
            self._progress.tell(State.ENDING)
            return True
        noticed = threading.Event()
        try:
            self._answer(connection, start, noticed)
        except Disconnected:
            noticed.set()
            connection.close()
            if self._has_failed(start):
                logger.info("a rank that trains was lost: waiting for their next start")
                return False
            self._exit_disconnected()
        self._close(connection)
        return True

    def _has_failed(self, start: int, seconds: float = FAILED_SECONDS) -> bool:
        """Return whether this start of the ranks that train has failed, or does within so many seconds."""
        with suppress(dist.DistError):
            ends = not self._outlives_training or has_ended(self._starts_store)
            return not ends and self._starts.await_failure(start, seconds)
        return False

    def _answer(self, connection: Connection, start: int, noticed: threading.Event) -> None:
        """Do what the first rank that trains asks for, until it asks this rank to exit.

        Args:
            noticed: set by the caller when it has noticed that the connection has ended.
        """
        self._register(connection)
        connection.on_disconnect(lambda: self._on_disconnect(start, noticed))
        while not isinstance(message := connection.receive(), Leave | End):
            if isinstance(message, Call):
                assert self._rank is not None, "calls come after Join"
                had_weights = self._rank.has_synced
                connection.send(self._rank.call(message))
                if self._rank.has_synced and not had_weights:
                    self._progress.tell(State.READY)
            elif isinstance(message, Join):
                self._join(message, connection)
        self._asked_to_exit = True
        self._progress.tell(State.LEAVING if isinstance(message, Leave) else State.ENDING)

    def _register(self, connection: Connection) -> None:
        confined_by = sandbox.protection() if self._recipe.reward.name == "code" else None
        engine_start = None if self._rank is None else self._rank.start
        connection.send(Register(distributed.rank(), self._progress.failure, confined_by, engine_start))
        self._progress.tell(State.CONNECTED)

    def _join(self, join: Join, connection: Connection) -> None:
        """Start the engine, or take up the one that is up."""
        if self._rank is None:
            recipe, rank = self._recipe, distributed.rank()
            assert recipe.rollout is not None, "checked when the recipe was read"
            size, first = recipe.rollout.tp * recipe.rollout.dp, recipe.role_ranks["generation"].start
            lowest = first + (rank - first) // size * size
            self._rank = GenerationRank(recipe, self._store, range(lowest, lowest + size), join.start)
        self._rank.begin(connection)
        connection.send(Joined())

    def _on_disconnect(self, start: int, noticed: threading.Event) -> None:
        """Exit, as the main thread may wait for a rank that is lost, unless it goes on with the next start."""
        if self._asked_to_exit:
            return
        if self._has_failed(start):
            with suppress(dist.DistError):
                if self._rank is not None:
                    self._rank.interrupt()
            if noticed.wait(BUSY_SECONDS):
                return
        self._exit_disconnected()

    def _exit_disconnected(self) -> NoReturn:
        with suppress(dist.DistError):
            if has_ended(self._starts_store):
                self._progress.tell(State.ENDING)
        os._exit(DISCONNECTED)

    def _close(self, connection: Connection) -> None:
        late = threading.Timer(CLOSE_SECONDS, os._exit, [1])  # where another rank of the engine is lost meanwhile
        late.daemon = True
        late.start()
        with suppress(Disconnected):
            connection.send(Leaving())
        if self._rank is not None:
            self._rank.close()
