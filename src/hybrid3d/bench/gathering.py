"""The way of other trainers, with the same engines at both ends: every tensor is rebuilt on every rank.

Each stage broadcasts what it holds to the ranks in the same place of the other stages; then TP groups, and for experts
the groups of EP x ETP, all-gather it; then each rank copies what vLLM wants of it. In buckets of two buffers: a
bucket is on its way while the one before is copied.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from hybrid3d import ranks
from hybrid3d.families import is_expert
from hybrid3d.reshard.box import Box
from hybrid3d.reshard.classes import Outline, natural
from hybrid3d.reshard.executor import Copies, Sink, Source
from hybrid3d.reshard.layout import ITEMSIZE, Demand, Holdings, Piece, Shape, View, contiguous_stride
from hybrid3d.reshard.memory import Memory, aligned
from hybrid3d.reshard.stamp import layer_of

Group = dist.ProcessGroup
Kind = tuple[int | None, str, str]
"""Layer, group over which it is gathered, dtype."""


@dataclass(frozen=True)
class Peers:
    """What a rank must know of the others.

    Attributes:
        outlines: what each rank holds.
        stages, tp, experts: the groups over which weights are brought together.
        columns: the ranks in each rank's place of every stage, in the order of the stages.
    """

    rank: int
    outlines: Sequence[Outline]
    shapes: Mapping[str, Shape]
    stages: Group
    tp: Group
    experts: Group
    columns: Sequence[Sequence[int]]

    @classmethod
    def meet(
        cls, outlines: Sequence[Outline], shapes: Mapping[str, Shape], groups: tuple[Group, Group, Group]
    ) -> Peers:
        """Every rank calls this together."""
        columns = ranks.gather(dist.get_process_group_ranks(groups[0]))
        return cls(dist.get_rank(), outlines, shapes, *groups, columns)


@dataclass
class _Bucket:
    """Parts of tensors of one layer and dtype that are brought together at once.

    Attributes:
        root: the rank of this rank's column that holds its part.
        group: over which the parts are gathered; None where each column has all.
        members: what each of the group's ranks holds, one piece behind the other, as it lies in that rank's bytes.
        nbytes: of the longest of them.
    """

    layer: int | None
    root: int
    group: Group | None
    members: list[list[Piece]]
    opens: bool = False
    closes: bool = False
    own: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    every: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    packing: Copies = field(default_factory=Copies)
    unpacking: Copies = field(default_factory=Copies)

    @property
    def nbytes(self) -> int:
        return max(sum(piece.nbytes for piece in pieces) for pieces in self.members)

    @property
    def buffer_bytes(self) -> int:
        return aligned(self.nbytes) + (0 if self.group is None else self.nbytes * len(self.members))


class Gather:
    """Rebuilds every tensor on this rank, a bucket at a time. Every rank calls `run` together.

    Attributes:
        operations: collectives and copies that a run launches.
        nbytes: memory of its buffers.
    """

    def __init__(
        self,
        peers: Peers,
        held: tuple[Holdings, Source],
        wanted: tuple[Demand, Sink],
        bucket_bytes: int,
        device: torch.device,
    ):
        self._peers = peers
        self._sink = wanted[1]
        self._broadcasts = len(peers.columns[peers.rank]) > 1
        self._buckets = list(_buckets(peers, bucket_bytes))
        sizes = [[bucket.buffer_bytes for bucket in self._buckets[turn::2]] for turn in (0, 1)]
        memory = [Memory(max(of_turn, default=0), device) for of_turn in sizes]
        holds, wants = _by_name(held[0]), _by_name(wanted[0])
        for i, bucket in enumerate(self._buckets):
            self._place(bucket, memory[i % 2])
            self._bind_unpacking(bucket, wants)
            if bucket.root == peers.rank:
                self._bind_packing(bucket, holds, held[1])
            bucket.opens = i == 0 or self._buckets[i - 1].layer != bucket.layer
            bucket.closes = i == len(self._buckets) - 1 or self._buckets[i + 1].layer != bucket.layer
        self.nbytes = sum(one.nbytes for one in memory)
        copies = sum(len(b.packing) + len(b.unpacking) for b in self._buckets)
        self.operations = copies + sum(self._broadcasts + (b.group is not None) for b in self._buckets)

    @staticmethod
    def _place(bucket: _Bucket, memory: Memory) -> None:
        bucket.own = memory.flat(0, bucket.nbytes, torch.uint8)
        if bucket.group is not None:
            bucket.every = memory.flat(aligned(bucket.nbytes), bucket.nbytes * len(bucket.members), torch.uint8)

    def _bind_unpacking(self, bucket: _Bucket, wants: Mapping[str, list[Piece]]) -> None:
        parts = [bucket.own] if bucket.group is None else bucket.every.split(bucket.nbytes)
        seen: set[tuple[str, Box]] = set()  # of several that hold the same, the first is read
        for flat, pieces in zip(parts, bucket.members, strict=True):
            for piece in pieces:
                for target in wants.get(piece.name, ()) if (piece.name, piece.box) not in seen else ():
                    common = piece.box.intersect(target.box)
                    if common is not None:
                        bucket.unpacking.add(self._sink.write(target.part(common)), _view(flat, piece.part(common)))
                seen.add((piece.name, piece.box))

    def _bind_packing(self, bucket: _Bucket, holds: Mapping[str, list[Piece]], source: Source) -> None:
        for piece in bucket.members[0 if bucket.group is None else dist.get_rank(bucket.group)]:
            lies = next(p for p in holds[piece.name] if p.box.contains(piece.box))
            bucket.packing.add(_view(bucket.own, piece), source.read(lies.part(piece.box)))

    @torch.no_grad()
    def run(self, copying: bool = True) -> int:
        """The bytes received.

        Args:
            copying: False for the collectives alone, whatever is in their buffers.
        """
        received, before = 0, None
        for bucket in self._buckets:
            if copying:
                bucket.packing.run()
            if self._broadcasts:
                dist.broadcast(bucket.own, bucket.root, group=self._peers.stages)
                received += bucket.nbytes if bucket.root != self._peers.rank else 0
            work = None
            if bucket.group is not None:
                work = dist.all_gather_into_tensor(bucket.every, bucket.own, group=bucket.group, async_op=True)
                received += bucket.nbytes * (len(bucket.members) - 1)
            if before is not None:
                self._finish(*before, copying)
            before = bucket, work
        if before is not None:
            self._finish(*before, copying)
        return received

    def _finish(self, bucket: _Bucket, work: dist.Work | None, copying: bool) -> None:
        if work is not None:
            work.wait()
        if not copying:
            return
        if bucket.opens:
            self._sink.open(bucket.layer)
        bucket.unpacking.run()
        if bucket.closes:
            self._sink.close(bucket.layer)


def _buckets(peers: Peers, limit: int) -> Iterator[_Bucket]:
    kinds = {rank: found for column in peers.columns for rank, found in zip(column, _kinds(peers, column), strict=True)}
    column = peers.columns[peers.rank]
    every = [(kind, stage) for stage, rank in enumerate(column) for kind in kinds[rank]]
    for kind, stage in sorted(every, key=lambda one: (one[0][0] is None, one)):
        layer, over, _ = kind
        found = {"tp": peers.tp, "experts": peers.experts}.get(over)
        members = [peers.rank] if found is None else dist.get_process_group_ranks(found)
        group = found if len(members) > 1 else None
        items = [kinds[peers.columns[member][stage]][kind] for member in members]
        for parts in _cut(items, limit // len(members)):
            yield _Bucket(layer, column[stage], group, [_laid_out(part) for part in parts])


def _kinds(peers: Peers, column: Sequence[int]) -> list[dict[Kind, list[Piece]]]:
    """What each rank of a column holds and none before it, by layer, group and dtype; where it lies is not known."""
    of_ranks: list[dict[Kind, list[Piece]]] = []
    seen: set[str] = set()
    for rank in column:
        found: dict[Kind, list[Piece]] = defaultdict(list)
        for boxes, names in peers.outlines[rank].items():
            for name in names:
                for box, dtype in boxes if name not in seen else ():
                    over = "experts" if is_expert(name) else "" if box == Box.whole(peers.shapes[name]) else "tp"
                    found[layer_of(name), over, dtype].append(Piece(name, box, View("", 0, ()), dtype))
        for pieces in found.values():
            pieces.sort(key=lambda piece: (natural(piece.name), piece.box.start))
        seen |= {name for names in peers.outlines[rank].values() for name in names}
        of_ranks.append(found)
    return of_ranks


def _cut(members: list[list[Piece]], limit: int) -> Iterator[list[list[Piece]]]:
    """Cut what each member holds alike, into parts of at most so many bytes; all at once where they are unlike."""
    sizes = [[piece.nbytes for piece in pieces] for pieces in members]
    if any(of_member != sizes[0] for of_member in sizes):
        yield members
        return
    small = [[part for piece in pieces for part in _split(piece, limit)] for pieces in members]
    first, load = 0, 0
    for i, piece in enumerate(small[0]):
        if load and load + piece.nbytes > limit:
            yield [pieces[first:i] for pieces in small]
            first, load = i, 0
        load += piece.nbytes
    yield [pieces[first:] for pieces in small]


def _split(piece: Piece, limit: int) -> list[Piece]:
    boxes = piece.box.split(max(1, limit // ITEMSIZE[piece.dtype]))
    return [Piece(piece.name, box, piece.view, piece.dtype) for box in boxes]


def _laid_out(pieces: Sequence[Piece]) -> list[Piece]:
    """The pieces one behind the other."""
    found, at = [], 0
    for piece in pieces:
        view = View("", at, contiguous_stride(piece.box.size))
        found.append(Piece(piece.name, piece.box, view, piece.dtype))
        at += piece.box.numel
    return found


def _by_name(side: Holdings | Demand) -> dict[str, list[Piece]]:
    found: dict[str, list[Piece]] = defaultdict(list)
    for piece in side.pieces:
        found[piece.name].append(piece)
    return found


def _view(flat: torch.Tensor, piece: Piece) -> torch.Tensor:
    typed = flat.view(getattr(torch, piece.dtype))
    return typed.as_strided(piece.box.size, piece.view.stride, typed.storage_offset() + piece.view.offset)
