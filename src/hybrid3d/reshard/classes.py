"""Tensors that move alike, as one: all that the same ranks hold and want in the same boxes.

In a model of 61 layers with 256 experts there are 45,000 tensors and a few hundred classes of them. Whatever is decided
or counted is so for a class at a time, and for each group of ranks that share what they hold or what they want.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from hybrid3d.reshard.box import Box
from hybrid3d.reshard.layout import Demand, Holdings

RankPieces = TypeVar("RankPieces", Holdings, Demand)

Boxes = tuple[tuple[Box, str], ...]
"""What a side has of one tensor: boxes, each with its dtype."""

Signature = Mapping[Boxes, tuple[str, ...]]
"""What others need to know of a side: of which tensors it has which boxes, not where they lie in its memory."""

Group = tuple[Sequence[int], Signature]
"""Ranks that share a side."""


@dataclass(frozen=True)
class TensorClass:
    """Tensors of which every group of ranks holds the same boxes and wants the same boxes, in the same dtypes.

    Attributes:
        names: the tensors, by the numbers in them, so that all who count them count alike.
        count: how many there are, with those that they stand for.
        held: the boxes that a group of holders has, by the group's number.
        wanted: the boxes that a group of readers wants, each with its dtype, by the group's number.
    """

    names: tuple[str, ...]
    count: int
    held: Mapping[int, tuple[Box, ...]]
    wanted: Mapping[int, Boxes]


def signature_of(side: Holdings | Demand) -> Signature:
    """A side without the places where its pieces lie."""
    of_tensor: dict[str, list[tuple[Box, str]]] = defaultdict(list)
    for piece in side.pieces:
        of_tensor[piece.name].append((piece.box, piece.dtype))
    found: dict[Boxes, list[str]] = defaultdict(list)
    for name, boxes in of_tensor.items():
        found[tuple(boxes)].append(name)
    return {boxes: tuple(names) for boxes, names in found.items()}


def classify_tensors(
    holders: Sequence[Signature], readers: Sequence[Signature], multiplicity: Mapping[str, int] | None = None
) -> list[TensorClass]:
    """All tensors that are wanted, by class, in the order of their first names.

    Args:
        holders: what each group of ranks holds.
        readers: what each group of ranks wants.
        times: how often a tensor counts, where it stands for others; once where nothing is said.
    """
    known: dict[Boxes, int] = {}
    held, wanted = _by_name(holders, known), _by_name(readers, known)
    boxes = list(known)
    classes: dict[tuple[_Found, _Found], list[str]] = defaultdict(list)
    for name, found in wanted.items():
        classes[held.get(name, ()), found].append(name)
    every = [
        TensorClass(
            names=tuple(sorted(names, key=natural_sort_key)),
            count=sum(multiplicity[name] for name in names) if multiplicity else len(names),
            held={group: tuple(dict.fromkeys(box for box, _ in boxes[number])) for group, number in held_by},
            wanted={group: boxes[number] for group, number in wanted_by},
        )
        for (held_by, wanted_by), names in classes.items()
    ]
    return sorted(every, key=lambda one: natural_sort_key(one.names[0]))


_Found = tuple[tuple[int, int], ...]
"""Of a tensor: (group, number of the boxes that it has)."""


def _by_name(sides: Sequence[Signature], known: dict[Boxes, int]) -> dict[str, _Found]:
    found: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for group, side in enumerate(sides):
        for boxes, names in side.items():
            entry = group, known.setdefault(boxes, len(known))
            for name in names:
                found[name].append(entry)
    return {name: tuple(entries) for name, entries in found.items()}


def natural_sort_key(name: str) -> list[tuple[int, str]]:
    """Sorts layer 2 before layer 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def group_ranks(sides: Mapping[int, RankPieces]) -> list[tuple[list[int], RankPieces]]:
    """What ranks have, once for all ranks that share it (as one object), with those ranks."""
    ranks: dict[int, list[int]] = defaultdict(list)
    for rank, side in sorted(sides.items(), key=lambda entry: entry[0]):
        ranks[id(side)].append(rank)
    return [(shared, sides[shared[0]]) for shared in ranks.values()]


def rank_groups(sides: Mapping[int, RankPieces]) -> list[Group]:
    """The ranks that share a side, each group with the side's outline."""
    return [(ranks, signature_of(side)) for ranks, side in group_ranks(sides)]


def select_tensors(sides: Mapping[int, RankPieces], names: Iterable[str]) -> dict[int, RankPieces]:
    """What ranks have of these canonical tensors; what they share they share again."""
    names = frozenset(names)
    kept: dict[int, RankPieces] = {}
    for ranks, side in group_ranks(sides):
        part = replace(side, pieces=tuple(p for p in side.pieces if p.name in names))
        kept |= dict.fromkeys(ranks, part)
    return {rank: kept[rank] for rank in sides}
