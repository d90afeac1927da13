"""The baseline of pure transport: the bytes of a plan between contiguous buffers, and one copy of the local bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch

from hybrid3d.reshard.move.transport import Transport
from hybrid3d.reshard.plan.planner import RankPlan


class Wire:
    """Sends one message to each peer and receives one from each, all at once.

    Args:
        sent, received: bytes by peer.
        stays: bytes that are copied within this rank.
    """

    def __init__(
        self,
        sent: Mapping[int, int],
        received: Mapping[int, int],
        stays: int,
        transport: Transport,
        device: torch.device,
    ):
        self._transport = transport
        outgoing = torch.zeros(max(sent.values(), default=0), dtype=torch.uint8, device=device)
        self._sends = [(outgoing[:nbytes], dst) for dst, nbytes in sent.items()]
        self._receives = [(torch.zeros(n, dtype=torch.uint8, device=device), src) for src, n in received.items()]
        self._stays, self._copy = (torch.zeros(stays, dtype=torch.uint8, device=device) for _ in range(2))
        self.operations = len(self._sends) + len(self._receives) + (1 if stays else 0)

    def run(self) -> int:
        """Run once, and return the received bytes."""
        before = self._transport.received_bytes
        for flat, src in self._receives:
            self._transport.submit_recv(flat, src, 0)
        for flat, dst in self._sends:
            self._transport.submit_send(flat, dst, 0)
        pending = self._transport.run()
        self._copy.copy_(self._stays)
        pending.wait()
        return self._transport.received_bytes - before


def bytes_by_peer(plan: RankPlan) -> tuple[dict[int, int], dict[int, int]]:
    """Return the bytes that a rank's plan sends to each peer, and receives from it, by peer."""
    sent: dict[int, int] = defaultdict(int)
    received: dict[int, int] = defaultdict(int)
    for t in plan.transfers:
        if not t.is_local and t.src == plan.rank:
            sent[t.dst] += t.nbytes
        elif not t.is_local:
            received[t.src] += t.nbytes
    return sent, received
