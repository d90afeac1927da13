"""Ranks that compute results together, as the first rank that trains sees them."""

from __future__ import annotations

from collections.abc import Mapping

from hybrid3d.roles.split.connections import Connection
from hybrid3d.roles.split.messages import Register


class WorkerGroup:
    """One start of the ranks that compute results together, and that are lost together.

    Of the role `generation` it is an engine of `rollout.tp` x `rollout.dp` ranks.

    Attributes:
        place: its number among the groups of its role.
        number: different for each start.
        connections: to its ranks, by rank.
        failures: why the processes of its ranks before these ended.
        kept: it was up before the ranks that train were started.
        started: those of the connections whose ranks have started what they serve with.
        lost: a rank of it has been lost, or it was asked to leave.
    """

    def __init__(self, place: int, number: int, registered: Mapping[int, tuple[Connection, Register]]):
        self.place, self.number = place, number
        self.connections = {rank: connection for rank, (connection, _) in sorted(registered.items())}
        self.failures = [register.failure for _, register in registered.values() if register.failure]
        self.kept = all(register.group_start is not None for _, register in registered.values())
        self.started: set[Connection] = set()
        self.lost = False

    @property
    def ranks(self) -> list[int]:
        return list(self.connections)

    @property
    def ready(self) -> bool:
        """Whether all of its ranks have started, and none is known to be lost."""
        return not self.lost and len(self.started) == len(self.connections)

    def __str__(self) -> str:
        first, last = self.ranks[0], self.ranks[-1]
        return f"rank {first}" if first == last else f"ranks {first} to {last}"
