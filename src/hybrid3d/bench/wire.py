"""The limit: a plan's bytes between the same ranks, from and to contiguous buffers, and one copy of what stays."""

from __future__ import annotations

from collections import defaultdict

import torch

from hybrid3d.reshard.planner import RankPlan
from hybrid3d.reshard.transport import Transport


class Wire:
    """Moves as many bytes as a rank's plan does: one message from and to each of its peers.

    Attributes:
        operations: sends, receives and copies that a run launches.
    """

    def __init__(self, plan: RankPlan, transport: Transport, device: torch.device):
        sent: dict[int, int] = defaultdict(int)
        received: dict[int, int] = defaultdict(int)
        for t in plan.transfers:
            if not t.is_local:
                (sent if t.src == plan.rank else received)[t.dst if t.src == plan.rank else t.src] += t.nbytes
        self._transport = transport
        self._sends = [(torch.zeros(n, dtype=torch.uint8, device=device), dst) for dst, n in sent.items()]
        self._receives = [(torch.zeros(n, dtype=torch.uint8, device=device), src) for src, n in received.items()]
        self._stays, self._copy = (torch.zeros(plan.local_bytes, dtype=torch.uint8, device=device) for _ in range(2))
        self.operations = len(self._sends) + len(self._receives) + 1

    @property
    def nbytes(self) -> int:
        """Of the buffers."""
        return sum(flat.nbytes for flat, _ in (*self._sends, *self._receives)) + 2 * self._copy.nbytes

    def run(self) -> int:
        """The bytes received."""
        before = self._transport.received_bytes
        for flat, src in self._receives:
            self._transport.submit_recv(flat, src, 0)
        for flat, dst in self._sends:
            self._transport.submit_send(flat, dst, 0)
        pending = self._transport.run()
        self._copy.copy_(self._stays)
        pending.wait()
        return self._transport.received_bytes - before
