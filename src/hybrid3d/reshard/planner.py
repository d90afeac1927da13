"""The plan: which rank sends which box to which, decided once, by a pure function of what everyone holds and wants.

Load, sync and export are the same call. The files of a checkpoint take part as one more rank, `FILES`: on load it
holds every tensor, on export it wants every tensor, and the rank at the other end reads or writes the box itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from hybrid3d.reshard.box import Box
from hybrid3d.reshard.classes import classes_of, distinct
from hybrid3d.reshard.layout import ITEMSIZE, Demand, Holdings, Piece
from hybrid3d.reshard.routes import Route, Routed, route

FILES = -1

# From this size on, a box that is contiguous at either end travels as a message of its own, unpacked at that end.
DIRECT_BYTES = 256 * 1024


class PlanError(ValueError):
    """What is wanted cannot be given: the message names the canonical tensor and the ranks."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """One box from one rank to one rank; on the same rank, or with `FILES` at one end, a local copy."""

    src: int
    dst: int
    source: Piece
    target: Piece

    @property
    def nbytes(self) -> int:
        return self.target.nbytes

    @property
    def is_local(self) -> bool:
        return self.src == self.dst or FILES in (self.src, self.dst)

    @property
    def direct_send(self) -> bool:
        return self.source.contiguous and self.source.dtype == self.target.dtype

    @property
    def direct_recv(self) -> bool:
        return self.target.contiguous and self.target.in_place


@dataclass(frozen=True, slots=True)
class Message:
    """Transfers of one dtype between one pair of ranks that travel as one send and one receive."""

    tag: int
    src: int
    dst: int
    dtype: str
    transfers: tuple[Transfer, ...]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.transfers)

    def staged_by(self, rank: int) -> int:
        """Bytes of staging that this message takes on `rank`: none where its memory is sent or filled directly."""
        if rank not in (self.src, self.dst):
            return 0
        only = self.transfers[0]
        direct = only.direct_send if rank == self.src else only.direct_recv
        return 0 if direct and len(self.transfers) == 1 else self.nbytes


@dataclass(frozen=True, slots=True)
class Bucket:
    """Transfers in the order in which they are wanted, bounded in bytes sent plus received on every rank."""

    transfers: tuple[Transfer, ...]
    messages: tuple[Message, ...]

    def of(self, rank: int) -> Bucket:
        """The part of this bucket in which `rank` takes part."""
        return Bucket(
            tuple(t for t in self.transfers if rank in (t.src, t.dst)),
            tuple(m for m in self.messages if rank in (m.src, m.dst)),
        )


@dataclass(frozen=True)
class Plan:
    """Every transfer of one reshard, in buckets of at most `bucket_bytes` sent plus received on any rank."""

    buckets: tuple[Bucket, ...]
    bucket_bytes: int

    @property
    def transfers(self) -> Iterator[Transfer]:
        return (t for bucket in self.buckets for t in bucket.transfers)

    @property
    def messages(self) -> Iterator[Message]:
        return (m for bucket in self.buckets for m in bucket.messages)

    @cached_property
    def received_bytes(self) -> Mapping[int, int]:
        return sums((m.dst, m.nbytes) for m in self.messages)

    @cached_property
    def sent_bytes(self) -> Mapping[int, int]:
        return sums((m.src, m.nbytes) for m in self.messages)

    @cached_property
    def local_bytes(self) -> Mapping[int, int]:
        return sums((t.dst if t.src == FILES else t.src, t.nbytes) for t in self.transfers if t.is_local)

    def of(self, rank: int) -> list[Bucket]:
        """The buckets in which `rank` has something to do, each without what concerns others only."""
        mine = (bucket.of(rank) for bucket in self.buckets)
        return [bucket for bucket in mine if bucket.transfers]

    @cached_property
    def staging_bytes(self) -> Mapping[int, int]:
        """By rank, the memory that the executor's two staging buffers take: a rank's buckets use them in turn."""
        buffers: dict[int, list[int]] = defaultdict(lambda: [0, 0])  # the one whose turn it is first
        for bucket in self.buckets:
            staged = dict.fromkeys((rank for t in bucket.transfers for rank in (t.src, t.dst)), 0)
            for message in bucket.messages:
                for rank in (message.src, message.dst):
                    staged[rank] += message.staged_by(rank)
            for rank, nbytes in staged.items():
                now, later = buffers[rank]
                buffers[rank] = [later, max(now, nbytes)]
        return defaultdict(int, {rank: sum(both) for rank, both in buffers.items()})


def make_plan(
    holdings: Mapping[int, Holdings],
    demand: Mapping[int, Demand],
    bucket_bytes: int,
    ranks_per_node: int = 1 << 30,
) -> Plan:
    """Give every wanted element exactly one source: the same rank, else the same node, else who has sent least.

    Args:
        holdings: pieces held, by rank; pieces of several ranks may overlap (replicas).
        demand: pieces wanted, by rank; pieces of one rank must not overlap.
        bucket_bytes: bound on the bytes that one rank sends and receives within one bucket.
        ranks_per_node: consecutive ranks that share a node.

    Raises:
        PlanError: somebody wants what nobody holds.
    """
    holders, readers = distinct(holdings), distinct(demand)
    classes = classes_of([side for _, side in holders], [side for _, side in readers])
    routed = route(classes, [ranks for ranks, _ in holders], [ranks for ranks, _ in readers], ranks_per_node)
    sources = _Sources(holdings, routed)
    wanted = sorted(((i, rank, p) for rank, d in demand.items() for i, p in enumerate(d.pieces)), key=lambda w: w[:2])
    transfers = [t for _, rank, piece in wanted for t in sources.transfers(rank, piece)]
    if sources.missing:
        raise PlanError(_missing_message(sources.missing))
    return Plan(tuple(_buckets(transfers, bucket_bytes)), bucket_bytes)


class _Sources:
    """Each wanted piece's transfers, as the route of its tensor has them."""

    def __init__(self, holdings: Mapping[int, Holdings], routed: Iterable[Routed]):
        self.missing: list[tuple[int, str, Box]] = []
        self._held = {(rank, p.name, p.box): p for rank, held in holdings.items() for p in held.pieces}
        self._route: dict[tuple[str, int], Route] = {}
        self._number: dict[str, int] = {}  # of a tensor within its class
        for one in routed:
            for number, name in enumerate(one.tensors.names):
                self._number[name] = number
                for way in one.routes:
                    self._route |= {(name, rank): way for rank in way.readers}
                    self.missing += [(rank, name, box) for box in way.missing for rank in way.readers]

    def transfers(self, rank: int, wanted: Piece) -> Iterator[Transfer]:
        for part in self._route[wanted.name, rank].parts[wanted.box]:
            src = rank if part.source is None else part.source.server(rank, self._number[wanted.name])
            held = self._held[src, wanted.name, part.held]
            yield Transfer(src, rank, held.part(part.box), wanted.part(part.box))


def _buckets(transfers: Iterable[Transfer], limit: int) -> Iterator[Bucket]:
    """Cut the sequence of transfers into buckets, and transfers that exceed a bucket into several."""
    load: dict[int, int] = defaultdict(int)
    current: list[Transfer] = []
    tag = 0
    for t in (part for whole in transfers for part in _split(whole, limit)):
        if not t.is_local:
            if max(load[t.src], load[t.dst]) + t.nbytes > limit:
                bucket = Bucket(tuple(current), _messages(current, tag))
                tag += len(bucket.messages)
                yield bucket
                current = []
                load.clear()
            load[t.src] += t.nbytes
            load[t.dst] += t.nbytes
        current.append(t)
    if current:
        yield Bucket(tuple(current), _messages(current, tag))


def _split(transfer: Transfer, limit: int) -> list[Transfer]:
    if transfer.is_local or transfer.nbytes <= limit:
        return [transfer]
    itemsize = ITEMSIZE[transfer.target.dtype]
    if limit < itemsize:
        raise ValueError(f"a bucket of {limit} bytes holds no element of {itemsize} bytes: make it larger")
    boxes = transfer.target.box.split(limit // itemsize)
    return [Transfer(transfer.src, transfer.dst, transfer.source.part(b), transfer.target.part(b)) for b in boxes]


def _messages(transfers: Iterable[Transfer], first_tag: int) -> tuple[Message, ...]:
    """Group what travels between one pair of ranks; large contiguous boxes go alone, so that nobody packs them."""
    groups: dict[tuple[int, int, str, int], list[Transfer]] = defaultdict(list)
    for i, t in enumerate(transfers):
        if not t.is_local:
            alone = t.nbytes >= DIRECT_BYTES and (t.direct_send or t.direct_recv)
            groups[t.src, t.dst, t.target.dtype, i if alone else -1].append(t)
    return tuple(
        Message(first_tag + n, src, dst, dtype, tuple(group))
        for n, ((src, dst, dtype, _), group) in enumerate(groups.items())
    )


def sums(pairs: Iterable[tuple[int, int]]) -> Mapping[int, int]:
    """The sum of what is paired with each rank."""
    total: dict[int, int] = defaultdict(int)
    for rank, nbytes in pairs:
        total[rank] += nbytes
    return total


def _missing_message(missing: list[tuple[int, str, Box]]) -> str:
    by_name: dict[str, list[tuple[int, Box]]] = defaultdict(list)
    for rank, name, box in missing:
        by_name[name].append((rank, box))
    lines = [f"{len(by_name)} wanted tensors are held by no rank in full:"]
    for name, boxes in list(by_name.items())[:20]:
        rank, box = boxes[0]
        others = len({rank for rank, _ in boxes}) - 1
        more = f" and {others} others" if others else ""
        lines.append(f"  {name} {list(box.start)} + {list(box.size)}, wanted by rank {rank}{more}")
    return "\n".join([*lines, *(["  ..."] if len(by_name) > 20 else [])])
