"""Plans which rank sends which box to which rank: a pure function of the holdings and demands of all ranks.

Every rank computes the same routes, by class of tensors. From them it builds only its own transfers, because the
transfers of all ranks would be too many: 46 million for DeepSeek-V3 on 1,024 ranks. The ranks agree on where each
bucket ends.

Load, sync and export use the same planner. The files of a checkpoint take part as one more rank, `FILES`: on load it
holds every tensor, on export it wants every tensor, and the rank at the other end reads or writes the box itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hybrid3d.errors import UserMistake
from hybrid3d.reshard.plan.box import Box
from hybrid3d.reshard.plan.classes import Group, classify_tensors, layer_of, rank_groups
from hybrid3d.reshard.plan.layout import FILES, ITEMSIZE, Demand, Holdings, LocalPieces, Piece
from hybrid3d.reshard.plan.order import Order
from hybrid3d.reshard.plan.relays import Relay
from hybrid3d.reshard.plan.routes import Part, Route, RoutedClass, has_relays, route_classes, split_parts

# A box of at least this size is a message of its own: where it is contiguous, it is sent or received without staging.
DIRECT_BYTES = 256 * 1024

# The tag of the messages that verify a sync; the tags of all other messages are smaller.
CHECKSUM_TAG = 1 << 20


class PlanError(UserMistake):
    """Demands that the holdings cannot meet, or settings in which ranks differ.

    The message names the ranks, and the canonical tensor.
    """


@dataclass(frozen=True, slots=True)
class Transfer:
    """The transfer of one box from one rank to another; a local copy if both are the same rank or one is `FILES`.

    Attributes:
        dtype: of the transferred data, which is the wanted one.
        source, target: the pieces that are read at the sender and written at the receiver; None where the memory
            location is not known on this rank.
        relayed: the sender hands on what it has received itself: `source` is where that has landed.
        handed_on: the receiver hands the box on, by relayed transfers of exactly this box.
    """

    src: int
    dst: int
    name: str
    box: Box
    dtype: str
    source: Piece | None
    target: Piece | None
    relayed: bool = False
    handed_on: bool = False

    @property
    def nbytes(self) -> int:
        return self.box.numel * ITEMSIZE[self.dtype]

    @property
    def is_local(self) -> bool:
        return self.src == self.dst or FILES in (self.src, self.dst)

    def is_direct(self, rank: int) -> bool:
        """Return whether the data lies contiguous in this rank's tensor, in the dtype of the transfer."""
        if rank == self.dst:
            return self.target is not None and self.target.contiguous
        return self.source is not None and self.source.contiguous and self.source.dtype == self.dtype


@dataclass(frozen=True, slots=True)
class Message:
    """Transfers of one dtype from one rank to another that are sent and received as one message.

    The pair of ranks and the tag identify the message at both ends.
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
        """Return the staging bytes of this message on `rank`: 0 where a tensor's memory is sent or filled directly."""
        if rank not in (self.src, self.dst):
            return 0
        return 0 if len(self.transfers) == 1 and self.transfers[0].is_direct(rank) else self.nbytes


@dataclass(frozen=True, slots=True)
class Bucket:
    """A rank's transfers that run together; the bytes that it sends plus receives in a bucket are bounded.

    Attributes:
        number: the bucket's index among all buckets of the plan, including those without transfers of this rank.
        layer: the layer of the tensors that the rank receives or copies; None for tensors outside of all layers.
        messages: those of the transfers that are not local.
    """

    number: int
    layer: int | None
    transfers: tuple[Transfer, ...]
    messages: tuple[Message, ...]


@dataclass(frozen=True)
class RankPlan:
    """The part of a plan that one rank executes."""

    rank: int
    buckets: tuple[Bucket, ...]

    @property
    def transfers(self) -> Iterator[Transfer]:
        return (t for bucket in self.buckets for t in bucket.transfers)

    @property
    def layers(self) -> list[int | None]:
        """The layers of which the rank receives or copies tensors, in the order of the plan."""
        return list(dict.fromkeys(b.layer for b in self.buckets if any(t.dst == self.rank for t in b.transfers)))

    @cached_property
    def awaited(self) -> tuple[int, ...]:
        """By bucket, the index of the last earlier bucket that brings what the bucket hands on; -1 without relays."""
        landed = {
            (t.name, t.box): index
            for index, bucket in enumerate(self.buckets)
            for t in bucket.transfers
            if t.handed_on and t.dst == self.rank
        }
        return tuple(
            max((landed[t.name, t.box] for t in b.transfers if t.relayed and t.src == self.rank), default=-1)
            for b in self.buckets
        )

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
        """The sizes of the executor's two staging buffers, which consecutive buckets use alternately."""
        staged = [sum(message.staging_bytes_on(self.rank) for message in bucket.messages) for bucket in self.buckets]
        return max(staged[::2], default=0), max(staged[1::2], default=0)


Plan = Mapping[int, RankPlan]
"""The plan of every rank, by rank."""


class Routes:
    """The routes of all tensors and the order of their transfers, which every rank computes identically.

    Args:
        holders: what each group of ranks holds; pieces of different ranks may overlap (replicas).
        readers: what each group of ranks wants; pieces of one rank must not overlap.
        bucket_bytes: the bound on the bytes that one rank sends plus receives within one bucket.
        ranks_per_node: the number of consecutive ranks that share a node.
        relays: receive what several ranks of a node want and none holds only once over the network; see `relays.py`.

    Raises:
        PlanError: a rank wants elements that no rank holds.
    """

    def __init__(
        self,
        holders: Sequence[Group],
        readers: Sequence[Group],
        bucket_bytes: int,
        ranks_per_node: int = 1 << 30,
        relays: bool = False,
    ):
        classes = classify_tensors([signature for _, signature in holders], [signature for _, signature in readers])
        routed = route_classes(
            classes, [ranks for ranks, _ in holders], [ranks for ranks, _ in readers], ranks_per_node, relays
        )
        self.bucket_bytes = bucket_bytes
        self.routed_classes = tuple(routed)
        _check_all_held(self.routed_classes)
        names = (name for tensor_class in classes for name in tensor_class.names)
        reading = [rank for ranks, _ in readers for rank in ranks]
        together = ranks_per_node if has_relays(self.routed_classes) else None
        self._order = Order(names, reading, _stages(holders), together)

    def rank_transfers(self, rank: int, pieces: LocalPieces) -> list[tuple[int, Transfer]]:
        """Return the transfers that a rank sends, receives or copies, as (key, transfer) in the order of their keys."""
        keyed = [
            keyed_transfer
            for routed_class in self.routed_classes
            for route in routed_class.routes
            for keyed_transfer in self._route_transfers(rank, routed_class, route, pieces)
        ]
        return sorted(keyed, key=lambda keyed_transfer: keyed_transfer[0])

    def _route_transfers(
        self, rank: int, routed_class: RoutedClass, route: Route, pieces: LocalPieces
    ) -> Iterator[tuple[int, Transfer]]:
        """Yield (key, transfer) for the transfers of one route in which a rank takes part."""
        reads = rank in route.readers
        sources = {p.source for parts in route.parts.values() for p in parts if p.source}
        sending = [source for source in sources if source.may_send(rank)]
        if not reads and not sending:
            return
        numbered = list(enumerate(split_parts(route, self.bucket_bytes)))
        for tensor, name in enumerate(routed_class.tensors.names):
            if reads:
                for i, (wanted, part, box) in numbered:
                    src = part.source.sender(rank, tensor) if part.source else rank
                    key = self._order.key(name, rank, i, isinstance(part.source, Relay))
                    yield key, _transfer(src, rank, name, wanted, part, box, pieces)
            for source in sending:
                served = [reader for reader in route.readers if source.sender(reader, tensor) == rank]
                for i, (wanted, part, box) in numbered if served else ():
                    if part.source == source:
                        for reader in served:
                            key = self._order.key(name, reader, i, isinstance(source, Relay))
                            yield key, _transfer(rank, reader, name, wanted, part, box, pieces)

    def plan(
        self, rank: int, rank_transfers: Sequence[tuple[int, Transfer]], bucket_boundaries: Sequence[int]
    ) -> RankPlan:
        """Return a rank's plan: its transfers, from `rank_transfers`, grouped in buckets and messages."""
        keys = np.array([key for key, _ in rank_transfers], np.int64)
        reads = rank in self._order
        tags: dict[tuple[int, int], int] = defaultdict(int)
        buckets = []
        start = 0
        for number, (boundary, stop) in enumerate(
            zip(bucket_boundaries, np.searchsorted(keys, bucket_boundaries), strict=True)
        ):
            transfers = tuple(t for _, t in rank_transfers[start:stop])
            if transfers:
                layer = self._order.layer(rank, boundary - 1) if reads else None
                buckets.append(Bucket(number, layer, transfers, group_messages(transfers, tags)))
            start = int(stop)
        return RankPlan(rank, tuple(buckets))

    def bucket_boundaries(
        self, local_transfers: Iterable[Sequence[tuple[int, Transfer]]], all_reduce_min: Callable[[int], int] = int
    ) -> list[int]:
        """Return the keys at which buckets end.

        A bucket ends with each phase of the order, and before any rank would send plus receive more than
        `bucket_bytes`.

        Args:
            local_transfers: the result of `rank_transfers` for each rank in this process.
            all_reduce_min: the minimum over all processes; by default all ranks are in this process.
        """
        loads = [_CumulativeBytes(rank_transfers) for rank_transfers in local_transfers]
        boundaries, start = [], 0
        while start < self._order.end:
            phase_end = (start // self._order.phase + 1) * self._order.phase
            end = all_reduce_min(min([phase_end, *(load.end_of_bucket(start, self.bucket_bytes) for load in loads)]))
            assert end > start, "a transfer is larger than a bucket"
            boundaries.append(end)
            start = end
        return boundaries


class _CumulativeBytes:
    """The bytes that a rank sends plus receives, accumulated in the order of keys."""

    def __init__(self, rank_transfers: Sequence[tuple[int, Transfer]]):
        remote = [(key, t.nbytes) for key, t in rank_transfers if not t.is_local]
        self._keys = np.array([key for key, _ in remote], np.int64)
        self._bytes_before = np.cumsum([0, *(nbytes for _, nbytes in remote)])

    def end_of_bucket(self, start: int, limit: int) -> int:
        """Return the key of the first transfer that exceeds the `limit` bytes of a bucket from key `start` on."""
        first = np.searchsorted(self._keys, start)
        last = np.searchsorted(self._bytes_before, self._bytes_before[first] + limit, side="right") - 1
        return int(self._keys[last]) if last < len(self._keys) else 1 << 62


def make_plan(
    holdings: Mapping[int, Holdings],
    demand: Mapping[int, Demand],
    bucket_bytes: int,
    ranks_per_node: int = 1 << 30,
    relays: bool = False,
) -> Plan:
    """Return the plans of all ranks, in which every wanted element has exactly one source; arguments as in `Routes`.

    Raises:
        PlanError: a rank wants elements that no rank holds.
    """
    routes = Routes(rank_groups(holdings), rank_groups(demand), bucket_bytes, ranks_per_node, relays)
    pieces = LocalPieces(holdings, demand)
    transfers_by_rank = {rank: routes.rank_transfers(rank, pieces) for rank in sorted({*holdings, *demand})}
    boundaries = routes.bucket_boundaries(transfers_by_rank.values())
    return {rank: routes.plan(rank, transfers, boundaries) for rank, transfers in transfers_by_rank.items()}


def local_plan(rank: int, holdings: Mapping[int, Holdings], demand: Mapping[int, Demand]) -> RankPlan:
    """Return a rank's plan of a load or an export, in which all transfers are local copies.

    Raises:
        PlanError: a rank wants elements that no rank holds.
    """
    routes = Routes(rank_groups(holdings), rank_groups(demand), bucket_bytes=0)
    rank_transfers = routes.rank_transfers(rank, LocalPieces(holdings, demand))
    return routes.plan(rank, rank_transfers, routes.bucket_boundaries([rank_transfers]))


def _stages(holders: Sequence[Group]) -> dict[int | None, int]:
    """Return, for each layer, the lowest rank that holds a tensor of it; it identifies the layer's pipeline stage."""
    stages: dict[int | None, int] = {}
    for ranks, signature in holders:
        for layer in {layer_of(name) for names in signature.values() for name in names}:
            stages[layer] = min(*ranks, stages.get(layer, ranks[0]))
    return stages


def _transfer(src: int, dst: int, name: str, wanted: Box, part: Part, box: Box, pieces: LocalPieces) -> Transfer:
    relayed = isinstance(part.source, Relay)
    source = pieces.target(src, name, part.held, box) if relayed else pieces.source(src, name, part.held, box)
    target = pieces.target(dst, name, wanted, box)
    return Transfer(src, dst, name, box, part.dtype, source, target, relayed, part.handed_on)


def group_messages(
    transfers: Iterable[Transfer], tags: dict[tuple[int, int], int], direct: bool = True
) -> tuple[Message, ...]:
    """Group the transfers between each pair of ranks into messages.

    Args:
        tags: the number of messages that each pair of ranks has in the buckets before; updated.
        direct: make a large box a message of its own, which needs no staging where the box is contiguous.
    """
    groups: dict[tuple[int, int, str, int], list[Transfer]] = defaultdict(list)
    for i, t in enumerate(transfers):
        if not t.is_local:
            groups[t.src, t.dst, t.dtype, i if direct and t.nbytes >= DIRECT_BYTES else -1].append(t)
    messages = []
    for (src, dst, dtype, _), group in groups.items():
        assert tags[src, dst] < CHECKSUM_TAG, f"rank {src} sends rank {dst} more messages than there are tags for"
        messages.append(Message(tags[src, dst], src, dst, dtype, tuple(group)))
        tags[src, dst] += 1
    return tuple(messages)


def _check_all_held(routed_classes: Iterable[RoutedClass]) -> None:
    """Raise `PlanError` with the missing boxes of up to 20 tensors, and ranks that want them, if no rank holds them."""
    missing: dict[str, tuple[Box, tuple[int, ...]]] = {}
    for routed_class in routed_classes:
        for route in routed_class.routes:
            for name in routed_class.tensors.names if route.missing else ():
                box, readers = missing.get(name, (route.missing[0], ()))
                missing[name] = box, readers + route.readers
    if missing:
        lines = [f"{len(missing)} wanted tensors are held by no rank in full:"]
        for name, (box, readers) in list(missing.items())[:20]:
            more = f" and {len(readers) - 1} others" if len(readers) > 1 else ""
            lines.append(f"  {name} {list(box.start)} + {list(box.size)}, wanted by rank {min(readers)}{more}")
        raise PlanError("\n".join([*lines, *(["  ..."] if len(missing) > 20 else [])]))
