"""The ranks that do not train: their roles, who accepts them, and what each does until the end of the run."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, NoReturn, Protocol, cast

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from hybrid3d import launch_environment, ledger
from hybrid3d.config import Recipe
from hybrid3d.distributed import clone_store
from hybrid3d.launch_environment import CLOSE_SECONDS, DISCONNECTED, END_SECONDS, START_SECONDS, State
from hybrid3d.ledger import RankStart, TrainingAttempts, has_ended
from hybrid3d.process import ChildProcess
from hybrid3d.run.logger import RunLogger
from hybrid3d.run.metrics import Peaks, Span
from hybrid3d.run.oom_recovery import find_out_of_memory
from hybrid3d.scoring.code import sandbox
from hybrid3d.watch.heartbeat import STARTING, enter_phase
from hybrid3d.workers.channel import Connection, Disconnected, Server, connect
from hybrid3d.workers.messages import Call, End, Join, Joined, Leave, Leaving, Register, Reply, Stop
from hybrid3d.workers.role_client import RoleClient

if TYPE_CHECKING:
    from hybrid3d.workers.engines import Engines
    from hybrid3d.workers.reward import RewardWorkers

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Role:
    """What a role consists of, as `module:class`: each process imports what it needs of it alone.

    Attributes:
        client, rank: the `RoleClient` of the first rank that trains, and the `RoleRank` of each of its ranks.
        out_of_memory: what helps a rank that runs out of memory.
    """

    client: str
    rank: str
    out_of_memory: str


ROLES = {
    "generation": Role(
        "hybrid3d.workers.engines:Engines",
        "hybrid3d.workers.generation:GenerationRank",
        "this rank only generates: lower rollout.gpu_memory_utilization",
    ),
    "reward": Role(
        "hybrid3d.workers.reward:RewardWorkers",
        "hybrid3d.workers.reward:RewardRank",
        "this rank only computes rewards: raise roles.reward.tp or roles.reward.pp",
    ),
}


class WorkerServer:
    """Accepts the ranks that do not train, and hands each to the groups of its role, which `roles` has by name."""

    def __init__(self, recipe: Recipe, store: Store, record: RunLogger, start: int):
        """`start` is the number of this start of the ranks that train."""
        self._recipe, self._store = recipe, store
        self.roles: dict[str, RoleClient] = {
            name: resolve_name(ROLES[name].client)(recipe, store, record) for name in recipe.worker_roles
        }
        self._server = Server(store, start, self._register)

    @property
    def engines(self) -> Engines | None:
        """The engines of ranks that only generate; None if those that train do."""
        return cast("Engines | None", self.roles.get("generation"))

    @property
    def reward_workers(self) -> RewardWorkers | None:
        """The ranks that only compute rewards; None if there are none."""
        return cast("RewardWorkers | None", self.roles.get("reward"))

    def _register(self, connection: Connection) -> None:
        try:
            register = connection.receive_a(Register)
        except Disconnected:
            connection.close()
            return
        self.roles[self._recipe.role_of(register.rank)].register(connection, register)

    def lap_busy_seconds(self) -> dict[str, float]:
        """Return, as metrics, the longest time that a rank of each role has been busy since the last call."""
        return {f"time/{role}_busy": groups.lap_busy_seconds() for role, groups in self.roles.items()}

    def spans(self, begin: float, end: float) -> dict[int, list[Span]]:
        """Return what each rank did between two moments; it waited in the rest of the time."""
        return {rank: spans for groups in self.roles.values() for rank, spans in groups.spans(begin, end).items()}

    def lap_peaks(self) -> dict[int, Peaks]:
        """Return the most bytes of memory that each rank has used since the last call, by activity."""
        return {rank: peaks for groups in self.roles.values() for rank, peaks in groups.lap_peaks().items()}

    def close(self) -> None:
        """End the run on all ranks of these roles, and on those that are started from now on."""
        ledger.end_run(self._store)
        for groups in self.roles.values():
            groups.close()
        self._server.close()


class RoleRank(Protocol):
    """What a rank serves with.

    Attributes:
        start: number of the start of its group.
        ready: whether it has shown that it works, so that it is started again when it is lost.
    """

    start: int
    ready: bool

    def begin(self, connection: Connection) -> None:
        """Begin to serve a start of the ranks that train; what an earlier one has asked for is dropped."""

    def interrupt(self) -> None:
        """Let the collectives in progress fail that ranks that train take part in. Any thread may call it."""

    def call(self, call: Call) -> Reply:
        """Do what is asked for, and return the result if this rank reports it."""

    def close(self) -> None:
        """Shut down."""


MakeRank = Callable[[Recipe, Store, range, int], RoleRank]
"""Called with the ranks of its group and the number of the group's start."""


class WorkerLoop:
    """What a rank that does not train does until the end of the run."""

    def __init__(self, recipe: Recipe, store: Store, progress: ChildProcess, make_rank: MakeRank):
        self._recipe, self._store, self._progress, self._make_rank = recipe, store, progress, make_rank
        self._role = recipe.role_of(launch_environment.rank())
        self._outlives_training = recipe.run.max_restarts > 0
        self._starts_store = clone_store(store)  # for threads, too
        self._starts = TrainingAttempts(store, launch_environment.world_size())
        self._rank: RoleRank | None = None
        self._asked_to_exit = False

    def run(self) -> None:
        """Start what this rank serves with once all ranks of its group have registered, and do what is asked for.

        If the ranks that train are started again, it stays up, and is at the service of their next start.

        Raises:
            Disconnected: the first rank that trains does not answer.
        """
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

    def _has_failed(self, start: int, seconds: float = END_SECONDS) -> bool:
        """Return whether this start of the ranks that train has failed, or does within so many seconds."""
        with suppress(dist.DistError):
            ends = not self._outlives_training or has_ended(self._starts_store)
            return not ends and self._starts.await_failure(start, seconds)
        return False

    def _answer(self, connection: Connection, start: int, noticed: threading.Event) -> None:
        """Do what the first rank that trains asks for, until it asks this rank to exit.

        The caller sets `noticed` when it has noticed that the connection has ended.
        """
        self._register(connection)
        connection.on_disconnect(lambda: self._on_disconnect(start, noticed))
        enter_phase("wait")
        while not isinstance(message := connection.receive(), Leave | End):
            if isinstance(message, Call):
                assert self._rank is not None, "calls come after Join"
                was_ready = self._rank.ready
                connection.send(self._rank.call(message))
                enter_phase("wait")
                if self._rank.ready and not was_ready:
                    self._progress.tell(State.READY)
            elif isinstance(message, Join):
                self._join(message, connection)
            else:
                assert isinstance(message, Stop), f"{type(message).__name__} is nothing that a rank is asked for"
        self._asked_to_exit = True
        self._progress.tell(State.LEAVING if isinstance(message, Leave) else State.ENDING)

    def _register(self, connection: Connection) -> None:
        runs_code = self._role == self._recipe.scoring_role and self._recipe.reward.name == "code"
        confined_by = sandbox.protection() if runs_code else None
        group_start = None if self._rank is None else self._rank.start
        connection.send(Register(launch_environment.rank(), self._progress.failure, confined_by, group_start))
        self._progress.tell(State.CONNECTED)

    def _join(self, join: Join, connection: Connection) -> None:
        """Start what this rank serves with, unless it is up."""
        if self._rank is None:
            enter_phase(STARTING)  # which takes long
            size, of_role = self._recipe.worker_group_size(self._role), self._recipe.role_ranks[self._role]
            place = of_role.index(launch_environment.rank()) // size
            self._rank = self._make_rank(self._recipe, self._store, of_role[place * size :][:size], join.start)
        self._rank.begin(connection)
        enter_phase("wait")
        connection.send(Joined())

    def _on_disconnect(self, start: int, noticed: threading.Event) -> None:
        """Exit, as the main thread may wait for a rank that is lost, unless it goes on with the next start."""
        if self._asked_to_exit:
            return
        if self._has_failed(start):
            with suppress(dist.DistError):
                if self._rank is not None:
                    self._rank.interrupt()
            if noticed.wait(START_SECONDS):
                return
        self._exit_disconnected()

    def _exit_disconnected(self) -> NoReturn:
        with suppress(dist.DistError):
            if has_ended(self._starts_store):
                self._progress.tell(State.ENDING)
        os._exit(DISCONNECTED)

    def _close(self, connection: Connection) -> None:
        late = threading.Timer(CLOSE_SECONDS, os._exit, [1])  # where another rank of the group is lost meanwhile
        late.daemon = True
        late.start()
        with suppress(Disconnected):
            connection.send(Leaving())
        if self._rank is not None:
            self._rank.close()


def run_worker(recipe: Recipe, start: RankStart) -> None:
    """Do what this rank's role does for the ranks that train, to the end of their run."""
    role = ROLES[recipe.role_of(launch_environment.rank())]
    try:
        WorkerLoop(recipe, start.store, start.progress, resolve_name(role.rank)).run()
    except RuntimeError as error:
        cause = find_out_of_memory(error)
        if cause is None:
            raise
        raise RuntimeError(f"{cause}: {role.out_of_memory}") from error
