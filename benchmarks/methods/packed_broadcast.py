"""A packed broadcast of what is no expert, and experts from shard to shard, as newer trainers do it (NeMo-RL's way).

Rank 0 receives every tensor that is no expert, layer by layer in packed buffers, and sends it to every rank, which
copies what its engine wants: `gathered_delta.py`, with all elements. Experts move as in hybrid3d's own plan, those of a
layer when the rest of it has been written, while the next layers are broadcast.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from methods.gathered_delta import GatheredDelta

from hybrid3d.bench.baselines import Peers
from hybrid3d.families import is_expert
from hybrid3d.reshard.ends import Sink, Source
from hybrid3d.reshard.move.executor import Executor
from hybrid3d.reshard.move.transport import Transport
from hybrid3d.reshard.plan.classes import Signature, layer_of
from hybrid3d.reshard.plan.layout import Demand, Holdings
from hybrid3d.reshard.plan.planner import RankPlan, group_messages

TAGS = 1 << 18  # from here on are those of experts, whose messages are in flight beside those of the broadcast


class OpenSink:
    """Writes into a sink whose layers somebody else opens and closes."""

    def __init__(self, sink: Sink):
        self.write = sink.write

    def open(self, layer: int | None) -> None: ...

    def close(self, layer: int | None) -> None: ...


class PackedBroadcast(GatheredDelta):
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
        dense = replace(peers, signatures=[_without_experts(signature) for signature in peers.signatures])
        apart = OpenSink(wanted[1])
        super().__init__(dense, frozenset(), {}, held, (wanted[0], apart), transport, device)
        self._closes, self._wanted_layers = wanted[1], frozenset(plan.layers)
        experts_transport = _OtherTags(transport)
        self._experts = [
            Executor(plan_of(plan, partial(_is_expert_of, layer)), held[1], apart, experts_transport, device)
            for layer, _ in self._layers
        ]
        self._buffers = self.nbytes

    def _write(self, number: int) -> None:
        """Write what this rank wants of a layer, first what is no expert, and close it."""
        super()._write(number)
        done = self._experts[number].run()
        self.operations += self._experts[number].operations
        self.nbytes = max(self.nbytes, self._buffers + done.staging_bytes + done.lent_bytes)
        close_layer(self._layers[number][0], self._wanted_layers, self._closes)


def close_layer(layer: int | None, wanted: Container[int | None], sink: Sink) -> None:
    """Open and close a layer that has been written, if this rank wants any of it."""
    if layer in wanted:
        sink.open(layer)
        sink.close(layer)


def _is_expert_of(layer: int | None, name: str) -> bool:
    return is_expert(name) and layer_of(name) == layer


class _OtherTags:
    """A transport of messages that have other tags than those of the transport that it uses."""

    def __init__(self, transport: Transport):
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def submit_send(self, tensor: torch.Tensor, dst: int, tag: int) -> None:
        self._transport.submit_send(tensor, dst, tag + TAGS)

    def submit_recv(self, tensor: torch.Tensor, src: int, tag: int) -> None:
        self._transport.submit_recv(tensor, src, tag + TAGS)


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
