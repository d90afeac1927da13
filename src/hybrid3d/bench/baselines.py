"""What a sync is compared with, between the same engines: a gather of every tensor on every rank, and pure transport.

In the gather, each stage broadcasts what it holds to the ranks at the same position of the other stages. TP groups,
and for experts the groups of EP x ETP, then all-gather it, and each rank copies what vLLM wants. This runs in buckets:
while two are broadcast, the previous one is gathered, and the one before that copied. Broadcasts and all-gathers
consist of sends and receives that are all in flight at once, as hybrid3d's are.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from hybrid3d.distributed import gather_objects
from hybrid3d.families import is_expert
from hybrid3d.reshard.ends import Sink, Source
from hybrid3d.reshard.move.memory import BatchedCopies, DeviceBuffer, align_up, strided_view
from hybrid3d.reshard.move.transport import Pending, Transport
from hybrid3d.reshard.plan.box import Box
from hybrid3d.reshard.plan.classes import Signature, layer_of, natural_sort_key
from hybrid3d.reshard.plan.layout import (
    ITEMSIZE,
    Demand,
    Holdings,
    Piece,
    Shape,
    View,
    contiguous_stride,
    pieces_by_name,
)
from hybrid3d.reshard.plan.planner import RankPlan

BROADCASTS_IN_FLIGHT = 2  # buckets that are broadcast while one is gathered
BUFFERS = BROADCASTS_IN_FLIGHT + 2

Group = dist.ProcessGroup
Kind = tuple[int | None, str, str]
"""Layer, group over which it is gathered, dtype."""


@dataclass(frozen=True)
class Peers:
    """What a rank needs to know about the other ranks."""

    rank: int
    signatures: Sequence[Signature]  # what each rank holds
    shapes: Mapping[str, Shape]
    tp: Sequence[int]  # the ranks over which this rank's weights are all-gathered
    experts: Sequence[int]  # those for its experts
    columns: Sequence[Sequence[int]]  # for each rank, those at its position of every stage, in the order of the stages

    @classmethod
    def create(
        cls,
        signatures: Sequence[Signature],
        shapes: Mapping[str, Shape],
        groups: tuple[Group, Group, Group],
        everyone: Group,
    ) -> Peers:
        """Make this rank's, from its groups over stages, TP ranks and experts; all ranks call it together."""
        stages, tp, experts = (dist.get_process_group_ranks(group) for group in groups)
        return cls(everyone.rank(), signatures, shapes, tp, experts, gather_objects(stages, everyone))


@dataclass
class _Bucket:
    """Parts of tensors of one layer and dtype that are gathered together."""

    layer: int | None
    root: int  # the rank of this rank's column that holds its part
    ranks: Sequence[int]  # whose parts are gathered; only this one if each column has the whole bucket
    members: list[list[Piece]]  # of each of these ranks, in the order in which they are stored in that rank's part
    opens: bool = False
    closes: bool = False
    local: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    parts: list[torch.Tensor] = field(default_factory=list)  # the memory of each, including `local`
    packing: BatchedCopies = field(default_factory=BatchedCopies)
    unpacking: BatchedCopies = field(default_factory=BatchedCopies)

    @property
    def nbytes(self) -> int:
        """The bytes of the longest part."""
        return max(sum(piece.nbytes for piece in pieces) for pieces in self.members)


class GatherBaseline:
    """Gathers every tensor on this rank, one bucket at a time. Every rank calls `run` together."""

    def __init__(
        self,
        peers: Peers,
        held: tuple[Holdings, Source],
        wanted: tuple[Demand, Sink],
        bucket_bytes: int,
        transport: Transport,
        device: torch.device,
    ):
        self._peers = peers
        self._sink = wanted[1]
        self._transport = transport
        self._buckets = list(_buckets(peers, bucket_bytes))
        sizes = [align_up(bucket.nbytes) * len(bucket.members) for bucket in self._buckets]
        memory = [DeviceBuffer(max(sizes[turn::BUFFERS], default=0), device) for turn in range(BUFFERS)]
        holds, wants = pieces_by_name(held[0].pieces), pieces_by_name(wanted[0].pieces)
        for i, bucket in enumerate(self._buckets):
            buffer, step = memory[i % BUFFERS], align_up(bucket.nbytes)
            bucket.parts = [buffer.flat_view(n * step, bucket.nbytes, torch.uint8) for n in range(len(bucket.ranks))]
            bucket.local = bucket.parts[bucket.ranks.index(peers.rank)]
            self._bind_unpacking(bucket, wants)
            if bucket.root == peers.rank:
                self._bind_packing(bucket, holds, held[1])
            bucket.packing.merge()
            bucket.unpacking.merge()
            bucket.opens = i == 0 or self._buckets[i - 1].layer != bucket.layer
            bucket.closes = i == len(self._buckets) - 1 or self._buckets[i + 1].layer != bucket.layer
        self.nbytes = sum(one.nbytes for one in memory)  # of its buffers

    @property
    def operations(self) -> int:
        """The number of sends, receives and copies of a run."""
        stages, found = len(self._peers.columns[self._peers.rank]) - 1, 0
        for bucket in self._buckets:
            spread = stages if bucket.root == self._peers.rank else 1
            found += spread + 2 * (len(bucket.ranks) - 1) + len(bucket.packing) + len(bucket.unpacking)
        return found

    def _bind_unpacking(self, bucket: _Bucket, wants: Mapping[str, list[Piece]]) -> None:
        seen: set[tuple[str, Box]] = set()  # a piece that several ranks hold is read from the first one
        for flat, pieces in zip(bucket.parts, bucket.members, strict=True):
            for piece in pieces:
                for target in wants.get(piece.name, ()) if (piece.name, piece.box) not in seen else ():
                    common = piece.box.intersect(target.box)
                    if common is not None:
                        bucket.unpacking.add(
                            self._sink.write(target.restrict(common)), _view(flat, piece.restrict(common))
                        )
                seen.add((piece.name, piece.box))

    def _bind_packing(self, bucket: _Bucket, holds: Mapping[str, list[Piece]], source: Source) -> None:
        for piece in bucket.members[bucket.ranks.index(self._peers.rank)]:
            lies = next(p for p in holds[piece.name] if p.box.contains(piece.box))
            bucket.packing.add(_view(bucket.local, piece), source.read(lies.restrict(piece.box)))

    @torch.no_grad()
    def run(self) -> int:
        """Run once, and return the received bytes."""
        received_before = self._transport.received_bytes
        before: tuple[_Bucket, Pending] | None = None
        spreading = deque(map(self._start_broadcast, range(min(BROADCASTS_IN_FLIGHT, len(self._buckets)))))
        for number, bucket in enumerate(self._buckets):
            spreading.popleft().wait()
            gathered = self._start_all_gather(number)
            if number + BROADCASTS_IN_FLIGHT < len(self._buckets):
                spreading.append(self._start_broadcast(number + BROADCASTS_IN_FLIGHT))
            if before is not None:
                self._finish(*before)
            before = bucket, gathered
        if before is not None:
            self._finish(*before)
        return self._transport.received_bytes - received_before

    def _start_broadcast(self, number: int) -> Pending:
        """Pack a bucket on the ranks that hold it, and start its broadcast to the other stages."""
        bucket = self._buckets[number]
        bucket.packing.run()
        if bucket.root != self._peers.rank:
            self._transport.submit_recv(bucket.local, bucket.root, 2 * number)
        else:
            for other in self._peers.columns[self._peers.rank]:
                if other != self._peers.rank:
                    self._transport.submit_send(bucket.local, other, 2 * number)
        return self._transport.run()

    def _start_all_gather(self, number: int) -> Pending:
        """Start the all-gather of a bucket's parts."""
        bucket = self._buckets[number]
        for other, part in zip(bucket.ranks, bucket.parts, strict=True):
            if other != self._peers.rank:
                self._transport.submit_recv(part, other, 2 * number + 1)
        for other in bucket.ranks:
            if other != self._peers.rank:
                self._transport.submit_send(bucket.local, other, 2 * number + 1)
        return self._transport.run()

    def _finish(self, bucket: _Bucket, gathered: Pending) -> None:
        gathered.wait()
        if bucket.opens:
            self._sink.open(bucket.layer)
        bucket.unpacking.run()
        if bucket.closes:
            self._sink.close(bucket.layer)

    def bytes_by_peer(self) -> tuple[dict[int, int], dict[int, int]]:
        """Return the bytes that a run sends to each peer, and receives from it, by peer."""
        sent: dict[int, int] = defaultdict(int)
        received: dict[int, int] = defaultdict(int)
        for bucket in self._buckets:
            if bucket.root != self._peers.rank:
                received[bucket.root] += bucket.nbytes
            for other in self._peers.columns[self._peers.rank] if bucket.root == self._peers.rank else ():
                sent[other] += bucket.nbytes
            for other in bucket.ranks:
                sent[other] += bucket.nbytes
                received[other] += bucket.nbytes
        for counts in (sent, received):
            counts.pop(self._peers.rank, None)
        return sent, received


def _buckets(peers: Peers, limit: int) -> Iterator[_Bucket]:
    everywhere = _held_in_full(peers)
    kinds = {
        rank: found
        for column in peers.columns
        for rank, found in zip(column, _kinds(peers, column, everywhere), strict=True)
    }
    column = peers.columns[peers.rank]
    every = []  # alternates between the layers of all stages, so that all stages send at the same time
    for stage, rank in enumerate(column):
        layers = sorted({layer for layer, _, _ in kinds[rank] if layer is not None})
        every += [(kind[0] is None, kind[0] and layers.index(kind[0]), stage, kind) for kind in kinds[rank]]
    for _, _, stage, kind in sorted(every):
        layer, over, _ = kind
        members = {"tp": peers.tp, "experts": peers.experts}.get(over, [peers.rank])
        items = [kinds[peers.columns[member][stage]][kind] for member in members]
        for parts in _cut(items, limit // len(members)):
            yield _Bucket(layer, column[stage], members, [_pack_views(part) for part in parts])


def _held_in_full(peers: Peers) -> list[set[str]]:
    """Return, for each stage, the tensors that each of its ranks holds in full; other tensors are gathered."""
    found = []
    for ranks in zip(*peers.columns, strict=True):
        held = [
            [(name, box) for boxes, names in peers.signatures[rank].items() for name in names for box, _ in boxes]
            for rank in ranks
        ]
        in_full = [{name for name, box in of_rank if box == Box.full(peers.shapes[name])} for of_rank in held]
        found.append(set.intersection(*in_full))
    return found


def _kinds(peers: Peers, column: Sequence[int], everywhere: Sequence[Container[str]]) -> list[dict[Kind, list[Piece]]]:
    """Return what each rank of a column holds and no rank before it, by layer, group and dtype, without views."""
    of_ranks: list[dict[Kind, list[Piece]]] = []
    seen: set[str] = set()
    for stage, rank in enumerate(column):
        found: dict[Kind, list[Piece]] = defaultdict(list)
        for boxes, names in peers.signatures[rank].items():
            for name in names:
                for box, dtype in boxes if name not in seen else ():
                    over = "experts" if is_expert(name) else "" if name in everywhere[stage] else "tp"
                    found[layer_of(name), over, dtype].append(Piece(name, box, View("", 0, ()), dtype))
        for pieces in found.values():
            pieces.sort(key=lambda piece: (natural_sort_key(piece.name), piece.box.start))
        seen |= {name for names in peers.signatures[rank].values() for name in names}
        of_ranks.append(found)
    return of_ranks


def _cut(members: list[list[Piece]], limit: int) -> Iterator[list[list[Piece]]]:
    """Split equal lists of members into parts of at most `limit` bytes; yield different lists as one part."""
    sizes = [[piece.nbytes for piece in pieces] for pieces in members]
    if any(of_member != sizes[0] for of_member in sizes):
        yield members
        return
    small = [
        [replace(piece, box=box) for piece in pieces for box in piece.box.split(max(1, limit // ITEMSIZE[piece.dtype]))]
        for pieces in members
    ]
    first, load = 0, 0
    for i, piece in enumerate(small[0]):
        if load and load + piece.nbytes > limit:
            yield [pieces[first:i] for pieces in small]
            first, load = i, 0
        load += piece.nbytes
    yield [pieces[first:] for pieces in small]


def _pack_views(pieces: Sequence[Piece]) -> list[Piece]:
    """Return the pieces with views of one contiguous buffer."""
    found, at = [], 0
    for piece in pieces:
        found.append(replace(piece, view=View("", at, contiguous_stride(piece.box.size))))
        at += piece.box.numel
    return found


def _view(flat: torch.Tensor, piece: Piece) -> torch.Tensor:
    return strided_view(flat.view(getattr(torch, piece.dtype)), piece.view, piece.box.size)


class Wire:
    """Pure transport: sends one message to each peer and receives one from each, all at once, and copies what stays.

    `sent` and `received` are bytes by peer, and `stays` the bytes that are copied within this rank.
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
