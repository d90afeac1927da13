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
from hybrid3d.reshard.layout import ITEMSIZE, Demand, Holdings

Side = TypeVar("Side", Holdings, Demand)


@dataclass(frozen=True)
class TensorClass:
    """Tensors of which every group of ranks holds the same boxes and wants the same boxes, in the same dtypes.

    Attributes:
        names: the tensors, by the numbers in them, so that all who count them count alike.
        count: how many there are, with those that they stand for.
        held: the boxes that a group of holders has, by the group's number.
        wanted: the boxes that a group of readers wants, each with the bytes of an element, by the group's number.
    """

    names: tuple[str, ...]
    count: int
    held: Mapping[int, tuple[Box, ...]]
    wanted: Mapping[int, tuple[tuple[Box, int], ...]]


def classes_of(
    holders: Sequence[Holdings], readers: Sequence[Demand], times: Mapping[str, int] | None = None
) -> list[TensorClass]:
    """All tensors by class, in the order of their first names.

    Args:
        holders: what each group of ranks holds.
        readers: what each group of ranks wants.
        times: how often a tensor counts, where it stands for others; once where nothing is said.
    """
    held, wanted = _by_name(holders), _by_name(readers)
    classes: dict[object, list[str]] = defaultdict(list)
    for name, boxes in wanted.items():
        classes[_signature(held.get(name, {})), _signature(boxes)].append(name)
    ordered = sorted((sorted(names, key=_natural) for names in classes.values()), key=lambda names: _natural(names[0]))
    return [_class_of(names, held.get(names[0], {}), wanted[names[0]], times or {}) for names in ordered]


def _natural(name: str) -> list[tuple[int, str]]:
    """Layer 2 before layer 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def distinct(sides: Mapping[int, Side]) -> list[tuple[list[int], Side]]:
    """What ranks have, once for all ranks that share it (as one object), with those ranks."""
    ranks: dict[int, list[int]] = defaultdict(list)
    for rank, side in sorted(sides.items(), key=lambda entry: entry[0]):
        ranks[id(side)].append(rank)
    return [(shared, sides[shared[0]]) for shared in ranks.values()]


def only(sides: Mapping[int, Side], names: Iterable[str]) -> dict[int, Side]:
    """What ranks have of these canonical tensors; what they share they share again."""
    names = frozenset(names)
    kept: dict[int, Side] = {}
    for ranks, side in distinct(sides):
        part = replace(side, pieces=tuple(p for p in side.pieces if p.name in names))
        kept |= dict.fromkeys(ranks, part)
    return {rank: kept[rank] for rank in sides}


_Found = dict[int, list[tuple[Box, str]]]


def _by_name(sides: Sequence[Holdings | Demand]) -> dict[str, _Found]:
    found: dict[str, _Found] = {}
    for group, side in enumerate(sides):
        for piece in side.pieces:
            found.setdefault(piece.name, {}).setdefault(group, []).append((piece.box, piece.dtype))
    return found


def _signature(found: _Found) -> object:
    return tuple((group, tuple(boxes)) for group, boxes in found.items())


def _class_of(names: list[str], held: _Found, wanted: _Found, times: Mapping[str, int]) -> TensorClass:
    return TensorClass(
        names=tuple(names),
        count=sum(times.get(name, 1) for name in names),
        held={group: tuple(dict.fromkeys(box for box, _ in boxes)) for group, boxes in held.items()},
        wanted={group: tuple((box, ITEMSIZE[dtype]) for box, dtype in boxes) for group, boxes in wanted.items()},
    )
