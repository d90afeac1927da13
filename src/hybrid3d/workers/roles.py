"""The roles of the ranks that do not train, as the first rank that trains sees them."""

from __future__ import annotations

from torch.distributed.distributed_c10d import Store

from hybrid3d.config import Recipe
from hybrid3d.run.logger import RunLogger
from hybrid3d.run.memory import Peaks
from hybrid3d.run.timeline import Span
from hybrid3d.workers.channel import Connection, Disconnected, Server
from hybrid3d.workers.engines import Engines
from hybrid3d.workers.messages import Register
from hybrid3d.workers.reward import RewardWorkers
from hybrid3d.workers.role_client import RoleClient


class WorkerServer:
    """Accepts the ranks that do not train, and hands each to the groups of its role.

    Attributes:
        engines: those of ranks that only generate; None if those that train do.
        reward_workers: those of ranks that only compute rewards; None if there are none.
    """

    def __init__(self, recipe: Recipe, store: Store, record: RunLogger, start: int):
        """
        Args:
            start: number of this start of the ranks that train.
        """
        self._recipe = recipe
        self.engines = Engines(recipe, store, record) if recipe.is_split else None
        self.reward_workers = None if recipe.roles.reward.ranks is None else RewardWorkers(recipe, store, record)
        found = {"generation": self.engines, "reward": self.reward_workers}
        self._roles: dict[str, RoleClient] = {role: groups for role, groups in found.items() if groups is not None}
        self._server = Server(store, start, self._register)

    def _register(self, connection: Connection) -> None:
        try:
            register = connection.receive_a(Register)
        except Disconnected:
            connection.close()
            return
        self._roles[self._recipe.role_of(register.rank)].register(connection, register)

    def lap_busy_seconds(self) -> dict[str, float]:
        """Return, as metrics, the longest time that a rank of each role has been busy since the last call."""
        return {f"time/{role}_busy": groups.lap_busy_seconds() for role, groups in self._roles.items()}

    def spans(self, begin: float, end: float) -> dict[int, list[Span]]:
        """Return what each rank did between two moments; it waited in the rest of the time."""
        return {rank: spans for groups in self._roles.values() for rank, spans in groups.spans(begin, end).items()}

    def lap_peaks(self) -> dict[int, Peaks]:
        """Return the most bytes of memory that each rank has used since the last call, by activity."""
        return {rank: peaks for groups in self._roles.values() for rank, peaks in groups.lap_peaks().items()}

    def close(self) -> None:
        """End the run on all ranks of these roles."""
        self._server.end_run()
        for groups in self._roles.values():
            groups.close()
        self._server.close()
