"""Chooses the ranks from which each reader receives the parts of a tensor, once for each class of tensors.

A wanted box is divided into parts by source: first the reader itself, then ranks of its node, then all other ranks.
Replicas that are equally near take turns, starting with the rank that has sent the fewest bytes.
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
    """A held box and its replicas, which are equally near to the ranks that read it and therefore take turns.

    Attributes:
        holders: the ranks that hold a replica, in the order of their turns.
        readers: the bytes that each reader receives from this source, in the order in which readers are served.
    """

    box: Box
    holders: tuple[int, ...]
    readers: dict[int, int] = field(default_factory=dict)

    def sender(self, reader: int, tensor: int) -> int:
        """Return the rank that sends the class's tensor of this index to this reader."""
        turn = tensor * len(self.readers) + self._reader_index[reader]
        return self.holders[turn % len(self.holders)]

    def fix_order(self, sent: Mapping[int, int]) -> None:
        """Sort the readers by rank and the holders by the bytes that they have sent, identically on every rank."""
        self.readers = dict(sorted(self.readers.items()))
        self.holders = tuple(sorted(self.holders, key=lambda rank: (sent[rank], rank)))
        self._reader_index = {reader: index for index, reader in enumerate(self.readers)}

    def traffic(self, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (senders, readers, bytes), three arrays, for `count` tensors; a pair of ranks may occur repeatedly."""
        nbytes = np.fromiter(self.readers.values(), np.int64)
        readers, num_holders = np.fromiter(self.readers, np.int64), len(self.holders)
        period = num_holders // np.gcd(len(readers), num_holders)  # the senders repeat after this many tensors
        tensors = np.arange(min(count, period))
        turns = (tensors[:, None] * len(readers) + np.arange(len(readers))[None, :]) % num_holders
        repeats = (count - tensors + period - 1) // period
        senders = np.asarray(self.holders, np.int64)[turns]
        return senders, np.broadcast_to(readers, senders.shape), repeats[:, None] * nbytes[None, :]


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a wanted box that one source provides.

    Attributes:
        dtype: the wanted dtype.
        held: the box of the source that contains the part.
        source: None if the reader holds the part itself.
    """

    box: Box
    dtype: str
    held: Box
    source: Source | None

    @property
    def nbytes(self) -> int:
        return self.box.numel * ITEMSIZE[self.dtype]


@dataclass(frozen=True)
class Route:
    """The parts of the tensors of a class for readers with the same demand, holdings and holders on their node.

    Attributes:
        parts: the parts of each wanted box.
        missing: the wanted boxes, or the rest of them, that no rank holds.
    """

    readers: tuple[int, ...]
    parts: Mapping[Box, tuple[Part, ...]]
    missing: tuple[Box, ...]


@dataclass(frozen=True)
class RoutedClass:
    """A class of tensors with its routes.

    Attributes:
        sources: all sources of the routes, except the readers themselves.
    """

    tensors: TensorClass
    routes: tuple[Route, ...]
    sources: tuple[Source, ...]


def route_classes(
    classes: Sequence[TensorClass], holders: Sequence[Ranks], readers: Sequence[Ranks], ranks_per_node: int
) -> Iterator[RoutedClass]:
    """Yield each class with its routes; the bytes that a rank sends of earlier classes affect its turns.

    Args:
        holders: the ranks of each group of holders, by the group's index.
        readers: the ranks of each group of readers, by the group's index.
        ranks_per_node: the number of consecutive ranks that share a node.
    """
    sent: dict[int, int] = defaultdict(int)
    for tensors in classes:
        routed_class = _Router(tensors, holders, ranks_per_node).route(readers)
        for source in sorted(routed_class.sources, key=lambda s: (s.box.start, s.box.size, min(s.readers))):
            source.fix_order(sent)
            senders, _, nbytes = source.traffic(tensors.count)
            for rank, n in zip(senders.flat, nbytes.flat, strict=True):
                sent[rank] += int(n)
        yield routed_class


class _Router:
    """Computes the routes of one class of tensors."""

    def __init__(self, tensors: TensorClass, holders: Sequence[Ranks], ranks_per_node: int):
        self._tensors = tensors
        self._ranks_per_node = ranks_per_node
        self._group_of_holder: dict[int, int] = {}
        self._holders: dict[Box, list[int]] = defaultdict(list)
        self._holders_on_node: dict[int, dict[Box, list[int]]] = defaultdict(lambda: defaultdict(list))
        for group, boxes in tensors.held.items():
            for rank in holders[group]:
                self._group_of_holder[rank] = group
                for box in boxes:
                    self._holders[box].append(rank)
                    self._holders_on_node[rank // ranks_per_node][box].append(rank)
        self._sources: dict[tuple[Box, int | None], Source] = {}

    def route(self, readers: Sequence[Ranks]) -> RoutedClass:
        """Return the class with one route for each set of readers with the same demand, holdings and node."""
        routes = []
        for group in self._tensors.wanted:
            ranks_by_place: dict[tuple[int | None, int | None], list[int]] = defaultdict(list)
            for rank in readers[group]:
                rank_node = rank // self._ranks_per_node
                place = self._group_of_holder.get(rank), rank_node if rank_node in self._holders_on_node else None
                ranks_by_place[place].append(rank)
            for (holder_group, node), ranks in ranks_by_place.items():
                routes.append(self._route(group, holder_group, node, ranks))
        return RoutedClass(self._tensors, tuple(routes), tuple(self._sources.values()))

    def _route(self, group: int, holder_group: int | None, node: int | None, ranks: list[int]) -> Route:
        """Return the route of ranks with one demand, and add them to the readers of its sources.

        Args:
            group: the ranks' group among the readers.
            holder_group: the ranks' group among the holders; None if they hold none of the class's tensors.
            node: the ranks' node; None if no rank of it holds any of the class's tensors.
        """
        parts: dict[Box, tuple[Part, ...]] = {}
        missing: list[Box] = []
        for box, dtype in self._tensors.wanted[group]:
            parts[box], rest = self._parts(box, dtype, holder_group, node)
            missing += rest
        for part in (part for parts_of_box in parts.values() for part in parts_of_box):
            if part.source is not None:
                for rank in ranks:
                    part.source.readers[rank] = part.source.readers.get(rank, 0) + part.nbytes
        return Route(tuple(ranks), parts, tuple(missing))

    def _parts(
        self, wanted: Box, dtype: str, holder_group: int | None, node: int | None
    ) -> tuple[tuple[Part, ...], list[Box]]:
        """Return the parts of a wanted box, and the boxes in it that no rank holds."""
        rest, parts = [wanted] if wanted.numel else [], []
        for held, place in self._nearest_first(wanted, holder_group, node):
            for box in list(rest):
                common = box.intersect(held)
                if common is not None:
                    rest.remove(box)
                    rest += box.subtract(common)
                    parts.append(Part(common, dtype, held, None if place is None else self._source(held, *place)))
            if not rest:
                break
        return tuple(sorted(parts, key=lambda part: part.box.start)), rest

    def _nearest_first(
        self, wanted: Box, holder_group: int | None, node: int | None
    ) -> Iterator[tuple[Box, tuple[int | None] | None]]:
        """Yield the held boxes that overlap a wanted box, each with the place where it is held.

        The place is None for the reader itself, then `(node,)` for its node, and then `(None,)` for any rank.
        """
        local = self._tensors.held[holder_group] if holder_group is not None else ()
        on_node = self._holders_on_node[node] if node is not None else {}
        for boxes, place in ((local, None), (on_node, (node,)), (self._holders, (None,))):
            for box in sorted((b for b in boxes if b.overlaps(wanted)), key=lambda b: (b.start, b.size)):
                yield box, place

    def _source(self, held: Box, node: int | None) -> Source:
        """Return the source of a held box on a node, or on all nodes if `node` is None; it is created only once."""
        key = held, node
        if key not in self._sources:
            ranks = self._holders[held] if node is None else self._holders_on_node[node][held]
            self._sources[key] = Source(held, tuple(ranks))
        return self._sources[key]
