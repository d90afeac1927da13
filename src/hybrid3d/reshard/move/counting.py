"""What transports have in common: the members of their group, the bytes that are received, and memory that is lent."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from hybrid3d.reshard.move.lent_memory import SharedMemory


class CountingTransport:
    """Counts received bytes, and lends messages to other ranks of the node if it is asked to.

    Args:
        group, ranks_per_node, ranks, timeout: as for `make_transport`.
        shares_memory: lend messages to the other ranks of the node whose processes can read this one's memory. Then
            every rank of the group makes the transport together.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        ranks_per_node: int,
        ranks: Sequence[int] | None = None,
        timeout: timedelta | None = None,
        shares_memory: bool = False,
    ):
        self.received_bytes = 0
        self.network_bytes = 0
        self._group = group
        ranks = ranks or range(group.size())
        self._members = {rank: member for member, rank in enumerate(ranks)}
        self._ranks_per_node, self._node = ranks_per_node, ranks[group.rank()] // ranks_per_node
        self.shared_memory: SharedMemory | None = None
        if shares_memory:
            near = [rank for rank in self._members if rank // ranks_per_node == self._node]
            self.shared_memory = SharedMemory(group, [*self._members], near, self._count, timeout)

    def _count(self, nbytes: int, src: int) -> None:
        self.received_bytes += nbytes
        if src // self._ranks_per_node != self._node:
            self.network_bytes += nbytes
