"""A packed broadcast of what is no expert, and experts from shard to shard, as newer trainers do it (NeMo-RL's way).

Rank 0 receives every tensor that is no expert, layer by layer in packed buffers, and sends it to every rank, which
copies what its engine wants: `gathered_delta.py`, with all elements. Experts move as in hybrid3d's own plan. Both are
staged as there, and a rank closes its layers when it has both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

import torch

from hybrid3d.bench.gathered_delta import GatheredDelta
from hybrid3d.bench.gathering import Peers
from hybrid3d.families import is_expert
from hybrid3d.reshard.classes import Signature
from hybrid3d.reshard.executor import Executor
from hybrid3d.reshard.layout import Demand, Holdings
from hybrid3d.reshard.planner import RankPlan, group_messages
from hybrid3d.reshard.protocols import Sink, Source
from hybrid3d.reshard.transport import Transport


class OpenSink:
    """Writes into a sink whose layers somebody else opens and closes."""

    def __init__(self, sink: Sink):
        self.write = sink.write

    def open(self, layer: int | None) -> None: ...

    def close(self, layer: int | None) -> None: ...


class PackedBroadcast:
    """Broadcasts what is no expert, and sends experts by a plan. Every rank calls `run` together.

    Attributes:
        nbytes: the bytes of its buffers.
        operations: the sends, receives and copies of the last run.
    """

    def __init__(
        self,
        peers: Peers,
        plan: RankPlan,
        held: tuple[Holdings, Source],
        wanted: tuple[Demand, Sink],
        transport: Transport,
        device: torch.device,
    ):
        self._plan, self._sink, self._transport = plan, wanted[1], transport
        apart = OpenSink(wanted[1])
        dense = replace(peers, signatures=[_without_experts(signature) for signature in peers.signatures])
        ends = (held[0], held[1]), (wanted[0], apart)
        self._broadcast = GatheredDelta(dense, frozenset(), {}, *ends, transport, device)
        self._experts = Executor(plan_of(plan, is_expert), held[1], apart, transport, device)
        self.nbytes = self._broadcast.nbytes
        self.operations = 0

    def run(self) -> int:
        """Run once, and return the received bytes."""
        before = self._transport.received_bytes
        self._broadcast.run()
        done = self._experts.run()
        self.nbytes = max(self.nbytes, self._broadcast.nbytes + done.staging_bytes + done.lent_bytes)
        self.operations = self._broadcast.operations + self._experts.operations
        close_layers(self._plan, self._sink)
        return self._transport.received_bytes - before


def close_layers(plan: RankPlan, sink: Sink) -> None:
    """Open and close every layer of a plan that has been written."""
    for layer in plan.layers:
        sink.open(layer)
        sink.close(layer)


def plan_of(plan: RankPlan, selects: Callable[[str], bool]) -> RankPlan:
    """Return the part of a rank's plan that moves the selected tensors."""
    tags: dict[tuple[int, int], int] = defaultdict(int)
    buckets = []
    for bucket in plan.buckets:
        transfers = tuple(t for t in bucket.transfers if selects(t.name))
        if transfers:
            buckets.append(replace(bucket, transfers=transfers, messages=group_messages(transfers, tags)))
    return RankPlan(plan.rank, tuple(buckets))


def _without_experts(signature: Signature) -> Signature:
    kept = {boxes: tuple(name for name in names if not is_expert(name)) for boxes, names in signature.items()}
    return {boxes: names for boxes, names in kept.items() if names}
