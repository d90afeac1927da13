"""The roles of the ranks that do not train: what each serves with, and how the first rank that trains sees them."""

from __future__ import annotations

from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, cast

from torch.distributed.distributed_c10d import Store

from hybrid3d import ledger
from hybrid3d.config import Recipe
from hybrid3d.run.logger import RunLogger
from hybrid3d.run.metrics import Peaks, Span
from hybrid3d.workers.channel import Connection, Disconnected, Server
from hybrid3d.workers.messages import Register
from hybrid3d.workers.role_client import RoleClient

if TYPE_CHECKING:
    from hybrid3d.workers.engines import Engines
    from hybrid3d.workers.reward import RewardWorkers


@dataclass(frozen=True)
class Role:
    """What a role consists of, as `module:class`: each process imports what it needs of it alone.

    Attributes:
        client: the `RoleClient` of the first rank that trains.
        rank: the `RoleRank` of each of its ranks.
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
