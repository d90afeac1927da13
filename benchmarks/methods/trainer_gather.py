"""A gather on the training side, sent from there peer to peer, as newer trainers do it (vLLM RDT's and miles' way).

Each training rank all-gathers the tensors of its own stage over its TP group, and experts over its EP x ETP group. The
engines then receive what they want, and nothing else, from a rank that has the whole tensor. Both steps are plans that
hybrid3d's executor runs, so that they are staged, pipelined and sent exactly as its own sync. They alternate over
layers, whose whole tensors share one buffer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from methods.packed_broadcast import OpenSink, close_layer

from hybrid3d.bench.baselines import Peers
from hybrid3d.distributed import all_reduce_min
from hybrid3d.families import is_expert
from hybrid3d.reshard.ends import NamedTensors, Sink, Source
from hybrid3d.reshard.exchange import JsonExchange
from hybrid3d.reshard.move.executor import Executor
from hybrid3d.reshard.move.memory import align_up
from hybrid3d.reshard.move.transport import Transport
from hybrid3d.reshard.plan.box import Box
from hybrid3d.reshard.plan.classes import layer_of, signature_of
from hybrid3d.reshard.plan.layout import (
    ITEMSIZE,
    Demand,
    Holdings,
    LocalPieces,
    Piece,
    View,
    contiguous_stride,
    pieces_by_name,
)
from hybrid3d.reshard.plan.planner import RankPlan, Routes

PART_BUCKETS = 4  # whole tensors that are gathered at a time fill so many buckets, if a layer is larger
BUFFER = "gathered"


class TrainerGather:
    """Gathers whole tensors on the ranks that train, and sends from there. Every rank calls `run` together.

    Attributes:
        nbytes: the bytes of its buffers.
        operations: the sends, receives and copies of a run.
    """

    def __init__(
        self,
        peers: Peers,
        plan: RankPlan,
        held: tuple[Holdings, Source],
        wanted: tuple[Demand, Sink],
        bucket_bytes: int,
        per_node: int,
        transport: Transport,
        group: dist.ProcessGroup,
        device: torch.device,
    ):
        """
        Args:
            plan: hybrid3d's, whose layers are closed at the end.
            per_node: ranks that share a node.
        """
        self._wanted_layers, self._sink, self._transport = frozenset(plan.layers), wanted[1], transport
        holds, wants = pieces_by_name(held[0].pieces), pieces_by_name(wanted[0].pieces)
        own = _names_of_own_groups(peers)
        parts = list(_parts(peers, PART_BUCKETS * bucket_bytes))
        gathered = [_whole_tensors(peers, [name for name in names if name in own]) for names in parts]
        size = max((_nbytes(pieces) for pieces in gathered), default=0)
        self._memory = torch.empty(size, dtype=torch.uint8, device=device)
        buffers = NamedTensors(
            {f"{BUFFER}.{dtype}": _as_dtype(self._memory, dtype) for dtype in {p.dtype for g in gathered for p in g}}
        )
        self._steps: list[tuple[Executor, Executor]] = []
        self._layers = [layer_of(names[0]) for names in parts]
        for names, whole in zip(parts, gathered, strict=True):
            here = Holdings(tuple(piece for name in names for piece in holds.get(name, ())))
            there = Demand(tuple(piece for name in names for piece in wants.get(name, ())))
            settings = bucket_bytes, per_node, group
            gather = _plan(here, Demand(tuple(whole)), *settings)
            send = _plan(Holdings(tuple(whole)), there, *settings)
            self._steps.append(
                (
                    Executor(gather, held[1], buffers, transport, device),
                    Executor(send, buffers, OpenSink(wanted[1]), transport, device),
                )
            )
        self.nbytes = self._memory.nbytes

    @property
    def operations(self) -> int:
        return sum(gather.operations + send.operations for gather, send in self._steps)

    def run(self) -> int:
        """Run once, and return the received bytes."""
        before, most = self._transport.received_bytes, 0
        for layer, following, steps in zip(self._layers, [*self._layers[1:], ...], self._steps, strict=True):
            for executor in steps:
                done = executor.run()
                most = max(most, done.staging_bytes + done.lent_bytes)
            if layer != following:
                close_layer(layer, self._wanted_layers, self._sink)
        self.nbytes = self._memory.nbytes + most
        return self._transport.received_bytes - before


def _plan(held: Holdings, wanted: Demand, bucket_bytes: int, per_node: int, group: dist.ProcessGroup) -> RankPlan:
    """Return this rank's plan from what each rank of the group holds and wants; all ranks call it together."""
    holders = JsonExchange(group).unique(signature_of(held))
    readers = JsonExchange(group).unique(signature_of(wanted))
    routes, rank = Routes(holders, readers, bucket_bytes, per_node), group.rank()
    transfers = routes.rank_transfers(rank, LocalPieces({rank: held}, {rank: wanted}))
    boundaries = routes.bucket_boundaries([transfers], partial(all_reduce_min, group=group))
    return routes.plan(rank, transfers, boundaries)


def _names_of_own_groups(peers: Peers) -> set[str]:
    """Return the tensors that this rank gathers: those that its TP group holds, and experts of its group of experts."""

    def names_of(ranks: Iterable[int]) -> set[str]:
        return {name for rank in ranks for names in peers.signatures[rank].values() for name in names}

    dense = {name for name in names_of(peers.tp) if not is_expert(name)}
    return dense | {name for name in names_of(peers.experts) if is_expert(name)}


def _parts(peers: Peers, limit: int) -> Iterable[Sequence[str]]:
    """Yield all tensors, layer by layer, in parts of so many bytes, the same ones on every rank."""
    part: list[str] = []
    nbytes = 0
    for name in sorted(peers.shapes, key=lambda name: (layer_of(name) is None, layer_of(name) or 0, name)):
        size = Box.full(peers.shapes[name]).numel * 2
        if part and (nbytes + size > limit or layer_of(name) != layer_of(part[0])):
            yield part
            part, nbytes = [], 0
        part.append(name)
        nbytes += size
    if part:
        yield part


def _whole_tensors(peers: Peers, names: Iterable[str]) -> list[Piece]:
    """Return pieces that are whole tensors, one behind the other in the buffer."""
    dtypes = {
        name: dtype
        for signature in peers.signatures
        for boxes, of_boxes in signature.items()
        for name in of_boxes
        for _, dtype in boxes
    }
    found, at = [], 0
    for name in names:
        box, dtype = Box.full(peers.shapes[name]), dtypes[name]
        view = View(f"{BUFFER}.{dtype}", at // ITEMSIZE[dtype], contiguous_stride(box.size))
        found.append(Piece(name, box, view, dtype))
        at += align_up(found[-1].nbytes)
    return found


def _nbytes(pieces: Iterable[Piece]) -> int:
    return sum(align_up(piece.nbytes) for piece in pieces)


def _as_dtype(memory: torch.Tensor, dtype: str) -> torch.Tensor:
    return memory[: len(memory) // ITEMSIZE[dtype] * ITEMSIZE[dtype]].view(getattr(torch, dtype))
