"""Who takes which part of a tensor from whom: decided once for each class of tensors.

A wanted box is cut into parts. What the reader holds itself it takes from there; the rest from its node, where a rank
of it holds that; else from anywhere. Replicas that are equally near take turns, beginning with who has sent least.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from hybrid3d.reshard.box import Box
from hybrid3d.reshard.classes import TensorClass
from hybrid3d.reshard.layout import ITEMSIZE

Ranks = Sequence[int]


@dataclass(eq=False)
class Source:
    """A held box and the replicas of it that take turns, because they are equally near to the ranks that read it.

    Attributes:
        holders: the replicas, in the order of their turns.
        readers: those that take a part of it, in the order in which they are served, and the bytes that each takes.
    """

    box: Box
    holders: tuple[int, ...]
    readers: dict[int, int] = field(default_factory=dict)

    def server(self, reader: int, number: int) -> int:
        """The replica that sends a class's `number`-th tensor to this reader."""
        turn = number * len(self.readers) + self._place[reader]
        return self.holders[turn % len(self.holders)]

    def fix_turns(self, sent: Mapping[int, int]) -> None:
        """Fix the order of turns, the same whoever makes the plan: who has sent least goes first."""
        self.readers = dict(sorted(self.readers.items()))
        self.holders = tuple(sorted(self.holders, key=lambda rank: (sent[rank], rank)))
        self._place = {reader: place for place, reader in enumerate(self.readers)}

    def traffic(self, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What `count` tensors send: (senders, readers, bytes), where a pair may stand several times."""
        nbytes = np.fromiter(self.readers.values(), np.int64)
        readers, n = np.fromiter(self.readers, np.int64), len(self.holders)
        period = n // np.gcd(len(readers), n)  # after so many tensors the same replicas serve the same readers again
        numbers = np.arange(min(count, period))
        turns = (numbers[:, None] * len(readers) + np.arange(len(readers))[None, :]) % n
        times = (count - numbers + period - 1) // period
        senders = np.asarray(self.holders, np.int64)[turns]
        return senders, np.broadcast_to(readers, senders.shape), times[:, None] * nbytes[None, :]


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a wanted box; `source` is None where the reader holds it itself."""

    box: Box
    dtype: str
    held: Box
    source: Source | None

    @property
    def nbytes(self) -> int:
        return self.box.numel * ITEMSIZE[self.dtype]


@dataclass(frozen=True)
class Route:
    """What readers that want the same, and have the same around them, take: per wanted box its parts."""

    readers: tuple[int, ...]
    parts: Mapping[Box, tuple[Part, ...]]
    missing: tuple[Box, ...]


@dataclass(frozen=True)
class RoutedClass:
    """A class of tensors, and its routes.

    Attributes:
        sources: all that its routes take from other ranks.
    """

    tensors: TensorClass
    routes: tuple[Route, ...]
    sources: tuple[Source, ...]


def route(
    classes: Sequence[TensorClass], holders: Sequence[Ranks], readers: Sequence[Ranks], ranks_per_node: int
) -> Iterator[RoutedClass]:
    """Each class with its routes; what a class sends counts when the next ones choose.

    Args:
        holders: the ranks of each group that holds, by the group's number.
        readers: the ranks of each group that wants.
        ranks_per_node: consecutive ranks that share a node.
    """
    sent: dict[int, int] = defaultdict(int)
    for tensors in classes:
        routed = _Router(tensors, holders, ranks_per_node).routed(readers)
        for source in sorted(routed.sources, key=lambda s: (s.box.start, s.box.size, min(s.readers))):
            source.fix_turns(sent)
            senders, _, nbytes = source.traffic(tensors.count)
            for rank, n in zip(senders.flat, nbytes.flat, strict=True):
                sent[rank] += int(n)
        yield routed


class _Router:
    """Makes the routes of one class."""

    def __init__(self, tensors: TensorClass, holders: Sequence[Ranks], ranks_per_node: int):
        self._tensors = tensors
        self._per_node = ranks_per_node
        self._own: dict[int, int] = {}  # by rank, its group among the holders
        self._holders: dict[Box, list[int]] = defaultdict(list)
        self._on_node: dict[int, dict[Box, list[int]]] = defaultdict(lambda: defaultdict(list))
        for group, boxes in tensors.held.items():
            for rank in holders[group]:
                self._own[rank] = group
                for box in boxes:
                    self._holders[box].append(rank)
                    self._on_node[rank // ranks_per_node][box].append(rank)
        self._sources: dict[tuple[Box, int | None], Source] = {}

    def routed(self, readers: Sequence[Ranks]) -> RoutedClass:
        routes = []
        for group in self._tensors.wanted:
            by_place: dict[tuple[int | None, int | None], list[int]] = defaultdict(list)
            for rank in readers[group]:
                node = rank // self._per_node
                by_place[self._own.get(rank), node if node in self._on_node else None].append(rank)
            routes += [self._route(group, own, node, ranks) for (own, node), ranks in by_place.items()]
        return RoutedClass(self._tensors, tuple(routes), tuple(self._sources.values()))

    def _route(self, group: int, own: int | None, node: int | None, ranks: list[int]) -> Route:
        parts: dict[Box, tuple[Part, ...]] = {}
        missing: list[Box] = []
        for box, dtype in self._tensors.wanted[group]:
            parts[box], rest = self._parts(box, dtype, own, node)
            missing += rest
        for part in (part for several in parts.values() for part in several):
            if part.source is not None:
                for rank in ranks:
                    part.source.readers[rank] = part.source.readers.get(rank, 0) + part.nbytes
        return Route(tuple(ranks), parts, tuple(missing))

    def _parts(self, wanted: Box, dtype: str, own: int | None, node: int | None) -> tuple[tuple[Part, ...], list[Box]]:
        rest, found = [wanted] if wanted.numel else [], []
        for held, near in self._nearest_first(wanted, own, node):
            for box in list(rest):
                common = box.intersect(held)
                if common is not None:
                    rest.remove(box)
                    rest += box.subtract(common)
                    found.append(Part(common, dtype, held, None if near is None else self._source(held, *near)))
            if not rest:
                break
        return tuple(sorted(found, key=lambda part: part.box.start)), rest

    def _nearest_first(
        self, wanted: Box, own: int | None, node: int | None
    ) -> Iterator[tuple[Box, tuple[int | None] | None]]:
        """Held boxes that overlap a wanted one: the reader's own (None), then its node's, then those of all (None,)."""
        local = self._tensors.held[own] if own is not None else ()
        here = self._on_node[node] if node is not None else {}
        for boxes, near in ((local, None), (here, (node,)), (self._holders, (None,))):
            for box in sorted((b for b in boxes if b.overlaps(wanted)), key=lambda b: (b.start, b.size)):
                yield box, near

    def _source(self, held: Box, node: int | None) -> Source:
        key = held, node
        if key not in self._sources:
            ranks = self._holders[held] if node is None else self._on_node[node][held]
            self._sources[key] = Source(held, tuple(ranks))
        return self._sources[key]
