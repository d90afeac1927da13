"""Ranks that compute results together, as the first rank that trains sees them."""

from __future__ import annotations

from collections.abc import Mapping

from hybrid3d.workers.channel import Connection
from hybrid3d.workers.messages import Register


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
        lost_in: the phase that its ranks were in when it was lost; empty if that is not known.
        awaited: whether the first rank that trains waited for it then.
    """

    def __init__(self, place: int, number: int, registered: Mapping[int, tuple[Connection, Register]]):
        self.place, self.number = place, number
        self.connections = {rank: connection for rank, (connection, _) in sorted(registered.items())}
        self.failures = [register.failure for _, register in registered.values() if register.failure]
        self.kept = all(register.group_start is not None for _, register in registered.values())
        self.started: set[Connection] = set()
        self.lost, self.lost_in, self.awaited = False, "", False

    @property
    def ranks(self) -> list[int]:
        return list(self.connections)

    @property
    def ready(self) -> bool:
        """Whether all of its ranks have started, and none is known to be lost."""
        return not self.lost and len(self.started) == len(self.connections)

    @property
    def lost_while(self) -> str:
        """What it did when it was lost, as the end of a message."""
        if not self.lost_in:
            return ""
        return f"; it was in phase {self.lost_in}" + (", and rank 0 waited for it" if self.awaited else "")

    def __str__(self) -> str:
        first, last = self.ranks[0], self.ranks[-1]
        return f"rank {first}" if first == last else f"ranks {first} to {last}"
