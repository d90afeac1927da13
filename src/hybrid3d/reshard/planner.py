"""The plan: which rank sends which box to which, decided once, by a pure function of what everyone holds and wants.

All ranks know the routes alike, by class of tensors; each makes of them the transfers that it takes part in, and no
more: of DeepSeek-V3 on 1,024 ranks there are 46 million. Where a bucket ends ranks agree on.

Load, sync and export are the same call. The files of a checkpoint take part as one more rank, `FILES`: on load it
holds every tensor, on export it wants every tensor, and the rank at the other end reads or writes the box itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from hybrid3d.errors import UserMistake
from hybrid3d.reshard.box import Box
from hybrid3d.reshard.classes import Group, classify_tensors, rank_groups
from hybrid3d.reshard.layout import ITEMSIZE, Demand, Holdings, Piece
from hybrid3d.reshard.order import Order
from hybrid3d.reshard.routes import Part, Route, RoutedClass, route
from hybrid3d.reshard.stamp import layer_of

FILES = -1

# From this size on a box travels as a message of its own, so that it is sent from where it lies and received where it
# belongs if it is contiguous there.
DIRECT_BYTES = 256 * 1024

# From here on tags are not those of messages.
CHECKSUM_TAG = 1 << 20

AllReduceMin = Callable[[int], int]
"""The smallest of the numbers that all ranks of a plan give."""


class PlanError(UserMistake):
    """What is wanted cannot be given: the message names the canonical tensor and the ranks."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """One box from one rank to one rank; on the same rank, or with `FILES` at one end, a local copy.

    Attributes:
        dtype: in which it travels: the one that is wanted.
        source, target: where it lies at each end; None where the rank at that end keeps it to itself.
    """

    src: int
    dst: int
    name: str
    box: Box
    dtype: str
    source: Piece | None
    target: Piece | None

    @property
    def nbytes(self) -> int:
        return self.box.numel * ITEMSIZE[self.dtype]

    @property
    def is_local(self) -> bool:
        return self.src == self.dst or FILES in (self.src, self.dst)

    def is_direct(self, rank: int) -> bool:
        """Whether what travels lies at this end as it travels."""
        if rank == self.dst:
            return self.target is not None and self.target.contiguous
        return self.source is not None and self.source.contiguous and self.source.dtype == self.dtype


@dataclass(frozen=True, slots=True)
class Message:
    """Transfers of one dtype between one pair of ranks that travel as one send and one receive.

    The two ends of it know it by its pair and its tag.
    """

    tag: int
    src: int
    dst: int
    dtype: str
    transfers: tuple[Transfer, ...]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.transfers)

    def staging_bytes_on(self, rank: int) -> int:
        """Bytes of staging that this message takes on `rank`: none where its memory is sent or filled directly."""
        if rank not in (self.src, self.dst):
            return 0
        return 0 if len(self.transfers) == 1 and self.transfers[0].is_direct(rank) else self.nbytes


@dataclass(frozen=True, slots=True)
class Bucket:
    """A rank's transfers that go at the same time, bounded in the bytes that it sends plus receives.

    Attributes:
        number: of all buckets of the plan, whether or not this rank has a part in them.
        layer: the layer that the rank takes something of, None for what is in no layer.
        transfers: all of them, in their order.
        messages: what carries those that are not local.
    """

    number: int
    layer: int | None
    transfers: tuple[Transfer, ...]
    messages: tuple[Message, ...]


@dataclass(frozen=True)
class RankPlan:
    """A rank's part of a plan."""

    rank: int
    buckets: tuple[Bucket, ...]

    @property
    def transfers(self) -> Iterator[Transfer]:
        return (t for bucket in self.buckets for t in bucket.transfers)

    @property
    def layers(self) -> list[int | None]:
        """Those that the rank takes something of, in their order."""
        return list(dict.fromkeys(b.layer for b in self.buckets if any(t.dst == self.rank for t in b.transfers)))

    @cached_property
    def received_bytes(self) -> int:
        return sum(t.nbytes for t in self.transfers if t.dst == self.rank and not t.is_local)

    @cached_property
    def sent_bytes(self) -> int:
        return sum(t.nbytes for t in self.transfers if t.src == self.rank and not t.is_local)

    @cached_property
    def local_bytes(self) -> int:
        return sum(t.nbytes for t in self.transfers if t.is_local)

    @cached_property
    def staging_bytes(self) -> tuple[int, int]:
        """What the executor's two staging buffers take, which buckets use in turn."""
        staged = [sum(message.staging_bytes_on(self.rank) for message in bucket.messages) for bucket in self.buckets]
        return max(staged[::2], default=0), max(staged[1::2], default=0)


Plan = Mapping[int, RankPlan]
"""The parts of all ranks."""


class LocalPieces:
    """Where boxes lie in the memory of the ranks of which that is known."""

    def __init__(self, holdings: Mapping[int, Holdings], demand: Mapping[int, Demand]):
        self._held = _by_box(holdings)
        self._wanted = _by_box(demand)

    def source(self, rank: int, name: str, held: Box, box: Box) -> Piece | None:
        piece = self._held.get((rank, name, held))
        return None if piece is None else piece.restrict(box)

    def target(self, rank: int, name: str, wanted: Box, box: Box) -> Piece | None:
        piece = self._wanted.get((rank, name, wanted))
        return None if piece is None else piece.restrict(box)


def _by_box(sides: Mapping[int, Holdings] | Mapping[int, Demand]) -> dict[tuple[int, str, Box], Piece]:
    return {(rank, piece.name, piece.box): piece for rank, side in sides.items() for piece in side.pieces}


class Routes:
    """What every rank knows alike: who takes which part of each class of tensors from whom, and in which order.

    Args:
        holders: what each group of ranks holds; pieces of several ranks may overlap (replicas).
        readers: what each group of ranks wants; pieces of one rank must not overlap.
        bucket_bytes: bound on the bytes that one rank sends and receives within one bucket.
        ranks_per_node: consecutive ranks that share a node.

    Raises:
        PlanError: somebody wants what nobody holds.
    """

    def __init__(
        self, holders: Sequence[Group], readers: Sequence[Group], bucket_bytes: int, ranks_per_node: int = 1 << 30
    ):
        classes = classify_tensors([side for _, side in holders], [side for _, side in readers])
        routed = route(classes, [ranks for ranks, _ in holders], [ranks for ranks, _ in readers], ranks_per_node)
        self.bucket_bytes = bucket_bytes
        self.routed = tuple(routed)
        _check_all_held(self.routed)
        names = (name for one in classes for name in one.names)
        self._order = Order(names, [rank for ranks, _ in readers for rank in ranks], _stages(holders))

    def rank_transfers(self, rank: int, known: LocalPieces) -> list[tuple[int, Transfer]]:
        """The transfers in which a rank takes part, with their keys and in their order."""
        found = [
            move for one in self.routed for way in one.routes for move in self._rank_transfers(rank, one, way, known)
        ]
        return sorted(found, key=lambda move: move[0])

    def _rank_transfers(
        self, rank: int, one: RoutedClass, way: Route, known: LocalPieces
    ) -> Iterator[tuple[int, Transfer]]:
        reads = rank in way.readers
        sending = {p.source for parts in way.parts.values() for p in parts if p.source and rank in p.source.holders}
        if not reads and not sending:
            return
        cuts = list(enumerate(_cut(way, self.bucket_bytes)))
        for number, name in enumerate(one.tensors.names):
            if reads:
                for i, (wanted, part, box) in cuts:
                    src = part.source.server(rank, number) if part.source else rank
                    yield self._order.key(name, rank, i), _transfer(src, rank, name, wanted, part, box, known)
            for source in sending:
                served = [reader for reader in way.readers if source.server(reader, number) == rank]
                for i, (wanted, part, box) in cuts if served else ():
                    if part.source is source:
                        for reader in served:
                            key = self._order.key(name, reader, i)
                            yield key, _transfer(rank, reader, name, wanted, part, box, known)

    def plan(
        self, rank: int, rank_transfers: Sequence[tuple[int, Transfer]], bucket_boundaries: Sequence[int]
    ) -> RankPlan:
        """A rank's moves in buckets."""
        keys = np.array([key for key, _ in rank_transfers], np.int64)
        reads = rank in self._order
        tags: dict[tuple[int, int], int] = defaultdict(int)
        buckets = []
        at = 0
        for number, (end, upto) in enumerate(
            zip(bucket_boundaries, np.searchsorted(keys, bucket_boundaries), strict=True)
        ):
            transfers = tuple(t for _, t in rank_transfers[at:upto])
            if transfers:
                layer = self._order.layer(rank, end - 1) if reads else None
                buckets.append(Bucket(number, layer, transfers, _messages(transfers, tags)))
            at = int(upto)
        return RankPlan(rank, tuple(buckets))

    def bucket_boundaries(
        self, of_ranks: Iterable[Sequence[tuple[int, Transfer]]], agree: AllReduceMin = int
    ) -> list[int]:
        """The keys at which buckets end: with every round, and before any rank would send and receive too much.

        Args:
            of_ranks: the moves of the ranks that are here.
            agree: with those that are not.
        """
        loads = [_Load(rank_transfers) for rank_transfers in of_ranks]
        bucket_boundaries, at = [], 0
        while at < self._order.end:
            whole = (at // self._order.round + 1) * self._order.round
            end = agree(min([whole, *(load.furthest(at, self.bucket_bytes) for load in loads)]))
            assert end > at, "a transfer is larger than a bucket"
            bucket_boundaries.append(end)
            at = end
        return bucket_boundaries


class _Load:
    """What a rank sends plus receives, by key."""

    def __init__(self, rank_transfers: Sequence[tuple[int, Transfer]]):
        travelling = [(key, t.nbytes) for key, t in rank_transfers if not t.is_local]
        self._keys = np.array([key for key, _ in travelling], np.int64)
        self._upto = np.cumsum([0, *(nbytes for _, nbytes in travelling)])

    def furthest(self, at: int, limit: int) -> int:
        """The key of the first transfer that a bucket which begins at `at` has no room for."""
        first = np.searchsorted(self._keys, at)
        last = np.searchsorted(self._upto, self._upto[first] + limit, side="right") - 1
        return int(self._keys[last]) if last < len(self._keys) else 1 << 62


def make_plan(
    holdings: Mapping[int, Holdings],
    demand: Mapping[int, Demand],
    bucket_bytes: int,
    ranks_per_node: int = 1 << 30,
) -> Plan:
    """Give every wanted element exactly one source, and make the parts of all ranks at once: see `Routes`.

    Raises:
        PlanError: somebody wants what nobody holds.
    """
    routes = Routes(rank_groups(holdings), rank_groups(demand), bucket_bytes, ranks_per_node)
    known = LocalPieces(holdings, demand)
    rank_transfers = {rank: routes.rank_transfers(rank, known) for rank in sorted({*holdings, *demand})}
    bucket_boundaries = routes.bucket_boundaries(rank_transfers.values())
    return {rank: routes.plan(rank, of_rank, bucket_boundaries) for rank, of_rank in rank_transfers.items()}


def local_plan(rank: int, holdings: Mapping[int, Holdings], demand: Mapping[int, Demand]) -> RankPlan:
    """A rank's part of a load or an export, in which nothing travels between ranks.

    Raises:
        PlanError: somebody wants what nobody holds.
    """
    routes = Routes(rank_groups(holdings), rank_groups(demand), bucket_bytes=0)
    rank_transfers = routes.rank_transfers(rank, LocalPieces(holdings, demand))
    return routes.plan(rank, rank_transfers, routes.bucket_boundaries([rank_transfers]))


def _stages(holders: Sequence[Group]) -> dict[int | None, int]:
    """By layer, the first rank that holds something of it: one for all layers of a stage."""
    found: dict[int | None, int] = {}
    for of_group, signature in holders:
        for layer in {layer_of(name) for names in signature.values() for name in names}:
            found[layer] = min(*of_group, found.get(layer, of_group[0]))
    return found


def _transfer(src: int, dst: int, name: str, wanted: Box, part: Part, box: Box, known: LocalPieces) -> Transfer:
    source, target = known.source(src, name, part.held, box), known.target(dst, name, wanted, box)
    return Transfer(src, dst, name, box, part.dtype, source, target)


class _Cut(NamedTuple):
    wanted: Box
    part: Part
    box: Box


def _cut(way: Route, limit: int) -> Iterator[_Cut]:
    """The parts of a route, those that travel cut into boxes that a bucket has room for."""
    for wanted, parts in way.parts.items():
        for part in parts:
            local = part.source is None or FILES in (*part.source.holders, *way.readers)
            if local or part.nbytes <= limit:
                yield _Cut(wanted, part, part.box)
                continue
            itemsize = ITEMSIZE[part.dtype]
            if limit < itemsize:
                raise ValueError(f"a bucket of {limit} bytes holds no element of {itemsize} bytes: make it larger")
            for box in part.box.split(limit // itemsize):
                yield _Cut(wanted, part, box)


def _messages(transfers: Iterable[Transfer], tags: dict[tuple[int, int], int]) -> tuple[Message, ...]:
    """Group what travels between one pair of ranks; large boxes go alone.

    Args:
        tags: how many messages each pair has had.
    """
    groups: dict[tuple[int, int, str, int], list[Transfer]] = defaultdict(list)
    for i, t in enumerate(transfers):
        if not t.is_local:
            groups[t.src, t.dst, t.dtype, i if t.nbytes >= DIRECT_BYTES else -1].append(t)
    found = []
    for (src, dst, dtype, _), group in groups.items():
        assert tags[src, dst] < CHECKSUM_TAG, f"rank {src} sends rank {dst} more messages than there are tags for"
        found.append(Message(tags[src, dst], src, dst, dtype, tuple(group)))
        tags[src, dst] += 1
    return tuple(found)


def _check_all_held(routed: Iterable[RoutedClass]) -> None:
    missing: dict[str, tuple[Box, tuple[int, ...]]] = {}
    for one in routed:
        for way in one.routes:
            for name in one.tensors.names if way.missing else ():
                box, readers = missing.get(name, (way.missing[0], ()))
                missing[name] = box, readers + way.readers
    if missing:
        lines = [f"{len(missing)} wanted tensors are held by no rank in full:"]
        for name, (box, readers) in list(missing.items())[:20]:
            more = f" and {len(readers) - 1} others" if len(readers) > 1 else ""
            lines.append(f"  {name} {list(box.start)} + {list(box.size)}, wanted by rank {min(readers)}{more}")
        raise PlanError("\n".join([*lines, *(["  ..."] if len(missing) > 20 else [])]))
