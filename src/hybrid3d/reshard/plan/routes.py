"""Chooses the ranks from which each reader receives the parts of a tensor, once for each class of tensors.

A wanted box is divided into parts by source: first the reader itself, then ranks of its node, then all other ranks.
Replicas that are equally near take turns, starting with the rank that has sent the fewest bytes.

With relays, what several ranks of a node want and no rank of it holds is received over the network only once: each of
them receives an equal share of it, and hands that on to the others (`relays.py`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np

from hybrid3d.reshard.plan.box import Box
from hybrid3d.reshard.plan.classes import Boxes, TensorClass
from hybrid3d.reshard.plan.layout import FILES, ITEMSIZE
from hybrid3d.reshard.plan.relays import Relay, Share, share_out

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

    def may_send(self, rank: int) -> bool:
        """Return whether a rank sends some of the class's tensors to some readers."""
        return rank in self.holders

    def sender(self, reader: int, tensor: int) -> int:
        """Return the rank that sends the class's tensor of this index to this reader."""
        turn = tensor * len(self.readers) + self._reader_index[reader]
        return self.holders[turn % len(self.holders)]

    def fix_order(self, sent: np.ndarray) -> None:
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
    """A part of a wanted box, in the wanted dtype, that one source provides.

    Attributes:
        held: the box of the source that contains the part; of a relay, the box that it wants itself.
        source: None if the reader holds the part itself.
        handed_on: the reader hands the part on to other ranks of its node.
    """

    box: Box
    dtype: str
    held: Box
    source: Source | Relay | None
    handed_on: bool = False

    @property
    def nbytes(self) -> int:
        return self.box.numel * ITEMSIZE[self.dtype]


@dataclass(frozen=True)
class Route:
    """The parts of the tensors of a class for readers with the same demand, holdings and holders on their node.

    With relays, the readers also have the same place among the ranks of their node that want the same. `parts` has
    those of each wanted box, `missing` what no rank holds of these boxes.
    """

    readers: tuple[int, ...]
    parts: Mapping[Box, tuple[Part, ...]]
    missing: tuple[Box, ...]


@dataclass(frozen=True)
class RoutedClass:
    """A class of tensors with its routes, and the holders of all of these, except the readers themselves."""

    tensors: TensorClass
    routes: tuple[Route, ...]
    sources: tuple[Source, ...]


def route_classes(
    classes: Sequence[TensorClass],
    holders: Sequence[Ranks],
    readers: Sequence[Ranks],
    ranks_per_node: int,
    relays: bool = False,
) -> Iterator[RoutedClass]:
    """Yield each class with its routes; the bytes that a rank sends of earlier classes affect its turns.

    Args:
        holders, readers: the ranks of each group of them, by the group's index.
        ranks_per_node, relays: as for `Routes`.
    """
    last_rank = max((rank for ranks in holders for rank in ranks), default=0)
    sent = np.zeros(last_rank + 2, np.int64)  # bytes by rank; FILES, which is -1, has the last place
    nodes = _nodes(readers, ranks_per_node) if relays else {}
    for turn, tensors in enumerate(classes):
        routed_class = _Router(tensors, holders, ranks_per_node, turn if relays else None).route(readers, nodes)
        for source in sorted(routed_class.sources, key=lambda s: (s.box.start, s.box.size, min(s.readers))):
            source.fix_order(sent)
            senders, _, nbytes = source.traffic(tensors.count)
            np.add.at(sent, senders, nbytes)
        yield routed_class


Nodes = Mapping[tuple[tuple[int, int], ...], Sequence[int]]
"""The nodes of each kind, by (position on the node, group) of their readers."""


def _nodes(readers: Sequence[Ranks], ranks_per_node: int) -> Nodes:
    """Group the nodes whose ranks at the same positions want the same."""
    on_node: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for group, ranks in enumerate(readers):
        for rank in ranks:
            on_node[rank // ranks_per_node].append((rank % ranks_per_node, group))
    nodes: dict[tuple[tuple[int, int], ...], list[int]] = defaultdict(list)
    for node, groups in sorted(on_node.items()):
        nodes[tuple(sorted(groups))].append(node)
    return nodes


@dataclass(frozen=True, slots=True)
class _Place:
    """What the readers of one route have in common.

    Attributes:
        holder_group: their group among the holders; None if they hold none of the class's tensors.
        node: their node; None if no rank of it holds any of the class's tensors.
        shares: by wanted box, what they receive from other nodes and from whom; empty where no other rank of the node
            wants any of it.
    """

    wanted: Boxes
    holder_group: int | None
    node: int | None
    shares: Mapping[Box, Sequence[Share]]


class _Router:
    """Computes the routes of one class of tensors; `turn` is None without relays, else as for `share_out`."""

    def __init__(self, tensors: TensorClass, holders: Sequence[Ranks], ranks_per_node: int, turn: int | None):
        self._tensors = tensors
        self._ranks_per_node = ranks_per_node
        self._turn = turn
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

    def route(self, readers: Sequence[Ranks], nodes: Nodes) -> RoutedClass:
        """Return the class with one route for each set of readers with the same demand, holdings and node."""
        shares = {} if self._turn is None else self._shares(nodes, self._turn)
        places: dict[tuple[int | None, ...], tuple[_Place, list[int]]] = {}
        group_of_holder, shares_of_rank, ranks_per_node = self._group_of_holder.get, shares.get, self._ranks_per_node
        nodes_with_holders = {node: node for node in self._holders_on_node}.get
        for group, wanted in self._tensors.wanted.items():
            for rank in readers[group]:  # a million times in a large plan
                holder_group, of_rank = group_of_holder(rank), shares_of_rank(rank)
                node = nodes_with_holders(rank // ranks_per_node)
                key = group, holder_group, node, id(of_rank)
                place = places.get(key)
                if place is None:
                    place = places[key] = _Place(wanted, holder_group, node, of_rank or {}), []
                place[1].append(rank)
        routes = tuple(self._route(place, ranks) for place, ranks in places.values())
        return RoutedClass(self._tensors, routes, tuple(self._sources.values()))

    def _shares(self, nodes: Nodes, turn: int) -> dict[int, dict[Box, list[Share]]]:
        """Return, for each rank that wants the same far elements as another of its node, whence it receives them.

        Nodes whose ranks want and hold the same share one object for each position.
        """
        found: dict[int, dict[Box, list[Share]]] = {}
        for groups, of_kind in nodes.items():
            members = [(place, self._tensors.wanted[g]) for place, g in groups if g in self._tensors.wanted]
            boxes = [box for _, wanted in members for box, _ in wanted]
            if len(members) < 2 or not any(a.overlaps(b) for a, b in combinations(boxes, 2)):
                continue
            same: dict[int | None, list[int]] = defaultdict(list)
            for node in of_kind:
                same[node if node in self._holders_on_node else None].append(node)
            for those in same.values():
                lacking = [
                    (place, box, dtype, self._far(box, those[0])) for place, wanted in members for box, dtype in wanted
                ]
                for place, shares in share_out(lacking, self._ranks_per_node, turn).items():
                    for node in those:
                        found[node * self._ranks_per_node + place] = shares
        return found

    def _far(self, wanted: Box, node: int) -> list[Box]:
        """Return disjoint boxes that cover what no rank of a node holds of a wanted box; no other rank matters."""
        rest = [wanted] if wanted.numel else []
        held: Mapping[Box, list[int]] = self._holders_on_node.get(node, {})
        for other in _in_order(held, wanted):
            rest = [part for box in rest for part in box.without(other)]
        return rest

    def _route(self, place: _Place, ranks: list[int]) -> Route:
        """Return the route of the readers of a place, and add them to the readers of its sources."""
        parts: dict[Box, tuple[Part, ...]] = {}
        missing: list[Box] = []
        for box, dtype in place.wanted:
            parts[box], rest = self._parts(box, dtype, place)
            missing += rest
        for part in (part for parts_of_box in parts.values() for part in parts_of_box):
            if isinstance(part.source, Source):
                of_source, nbytes = part.source.readers, part.nbytes
                for rank in ranks:
                    of_source[rank] = of_source.get(rank, 0) + nbytes
        return Route(tuple(ranks), parts, tuple(missing))

    def _parts(self, wanted: Box, dtype: str, place: _Place) -> tuple[tuple[Part, ...], list[Box]]:
        """Return the parts of a wanted box, and the boxes in it that no rank holds."""
        parts: list[Part] = []
        rest = [wanted] if wanted.numel else []
        if place.holder_group is not None:
            found, rest = _cut(rest, self._tensors.held[place.holder_group])
            parts += [Part(box, dtype, held, None) for box, held in found]
        if place.node is not None:
            found, rest = _cut(rest, self._holders_on_node[place.node])
            parts += [Part(box, dtype, held, self._source(held, place.node)) for box, held in found]
        shares = place.shares.get(wanted)
        if shares is None:
            found, rest = _cut(rest, self._holders)
            parts += [Part(box, dtype, held, self._source(held, None)) for box, held in found]
        else:
            rest = []
            for share in shares:
                found, missing = _cut([share.box], self._holders)
                rest += missing
                for box, held in found:
                    source = share.relay or self._source(held, None)
                    parts.append(Part(box, dtype, source.box, source, share.handed_on))
        return tuple(sorted(parts, key=lambda part: part.box.start)), rest

    def _source(self, held: Box, node: int | None) -> Source:
        """Return the source of a held box on a node, or on all nodes if `node` is None; it is created only once."""
        key = held, node
        if key not in self._sources:
            ranks = self._holders[held] if node is None else self._holders_on_node[node][held]
            self._sources[key] = Source(held, tuple(ranks))
        return self._sources[key]


def _in_order(held: Iterable[Box], wanted: Box) -> list[Box]:
    """Return the held boxes that overlap a wanted box, in the same order on every rank."""
    return sorted((box for box in held if box.overlaps(wanted)), key=lambda box: (box.start, box.size))


def _cut(boxes: Iterable[Box], held: Iterable[Box]) -> tuple[list[tuple[Box, Box]], list[Box]]:
    """Return the parts of disjoint boxes that are held, each with the held box that contains it, and the rest."""
    found: list[tuple[Box, Box]] = []
    rest: list[Box] = []
    for box in boxes:
        left = [box]
        for other in _in_order(held, box):
            for part in list(left):
                common = part.intersect(other)
                if common is not None:
                    left.remove(part)
                    left += part.subtract(common)
                    found.append((common, other))
            if not left:
                break
        rest += left
    return found, rest


def split_parts(route: Route, limit: int) -> Iterator[tuple[Box, Part, Box]]:
    """Yield (wanted box, part of it, box of the part) of a route.

    Only a part that is sent to another rank, and has more than `limit` bytes, is split into several boxes.

    Raises:
        ValueError: an element has more than `limit` bytes.
    """
    for wanted, parts in route.parts.items():
        for part in parts:
            of_files = isinstance(part.source, Source) and FILES in part.source.holders
            local = part.source is None or of_files or FILES in route.readers
            if local or part.nbytes <= limit:
                yield wanted, part, part.box
                continue
            itemsize = ITEMSIZE[part.dtype]
            if limit < itemsize:
                raise ValueError(f"a bucket of {limit} bytes holds no element of {itemsize} bytes: make it larger")
            for box in part.box.split(limit // itemsize):
                yield wanted, part, box


def has_relays(routed_classes: Iterable[RoutedClass]) -> bool:
    """Return whether any part is handed on within a node."""
    return any(
        part.handed_on
        for routed_class in routed_classes
        for route in routed_class.routes
        for parts in route.parts.values()
        for part in parts
    )
