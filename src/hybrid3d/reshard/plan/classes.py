"""Classes of tensors that the same ranks hold and want in the same boxes.

A model of 61 layers with 256 experts has 45,000 tensors but only a few hundred classes. Planning and counting work on
one class at a time, and on groups of ranks that hold or want the same.

The pieces of one layer stand for all layers of the same kind, so that engines are queried once for each kind.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from hybrid3d.reshard.plan.box import Box
from hybrid3d.reshard.plan.layout import Demand, Holdings, Piece, View

RankPieces = TypeVar("RankPieces", Holdings, Demand)

Boxes = tuple[tuple[Box, str], ...]
"""The boxes of one tensor that a rank holds or wants, each with its dtype."""

Signature = Mapping[Boxes, tuple[str, ...]]
"""The tensors of which a rank holds (or wants) the same boxes, by those boxes; without local memory locations."""

Group = tuple[Sequence[int], Signature]
"""Ranks that hold (or want) the same, and the signature of it."""


@dataclass(frozen=True)
class TensorClass:
    """Tensors of which every group of ranks holds and wants the same boxes, in the same dtypes.

    Attributes:
        names: the tensors in natural order, so that every rank numbers them equally.
        count: the number of tensors, including the tensors that a listed name represents.
        held, wanted: the boxes that each group of ranks has, and wants, by the group's index.
    """

    names: tuple[str, ...]
    count: int
    held: Mapping[int, tuple[Box, ...]]
    wanted: Mapping[int, Boxes]


def signature_of(rank_pieces: Holdings | Demand) -> Signature:
    """Return the boxes and dtypes that a rank holds or wants, without their local memory locations."""
    boxes_by_name: dict[str, list[tuple[Box, str]]] = defaultdict(list)
    for piece in rank_pieces.pieces:
        boxes_by_name[piece.name].append((piece.box, piece.dtype))
    names_by_boxes: dict[Boxes, list[str]] = defaultdict(list)
    for name, boxes in boxes_by_name.items():
        names_by_boxes[tuple(boxes)].append(name)
    return {boxes: tuple(names) for boxes, names in names_by_boxes.items()}


def classify_tensors(
    holders: Sequence[Signature], readers: Sequence[Signature], multiplicity: Mapping[str, int] | None = None
) -> list[TensorClass]:
    """Return the classes of all wanted tensors, in the natural order of their first names.

    Args:
        multiplicity: the number of tensors that each name represents; 1 by default.
    """
    box_ids: dict[Boxes, int] = {}
    held, wanted = _by_name(holders, box_ids), _by_name(readers, box_ids)
    boxes = list(box_ids)
    names_by_class: dict[tuple[_GroupBoxes, _GroupBoxes], list[str]] = defaultdict(list)
    for name, wanted_by in wanted.items():
        names_by_class[held.get(name, ()), wanted_by].append(name)
    classes = [
        TensorClass(
            names=tuple(sorted(names, key=natural_sort_key)),
            count=sum(multiplicity[name] for name in names) if multiplicity else len(names),
            held={group: tuple(dict.fromkeys(box for box, _ in boxes[number])) for group, number in held_by},
            wanted={group: boxes[number] for group, number in wanted_by},
        )
        for (held_by, wanted_by), names in names_by_class.items()
    ]
    return sorted(classes, key=lambda tensors: natural_sort_key(tensors.names[0]))


_GroupBoxes = tuple[tuple[int, int], ...]
"""For one tensor: (group, id of the boxes that the group has of it)."""


def _by_name(signatures: Sequence[Signature], box_ids: dict[Boxes, int]) -> dict[str, _GroupBoxes]:
    found: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for group, signature in enumerate(signatures):
        for boxes, names in signature.items():
            entry = group, box_ids.setdefault(boxes, len(box_ids))
            for name in names:
                found[name].append(entry)
    return {name: tuple(entries) for name, entries in found.items()}


def natural_sort_key(name: str) -> list[tuple[int, str]]:
    """Return a sort key that puts layer 2 before layer 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def group_ranks(pieces_by_rank: Mapping[int, RankPieces]) -> list[tuple[list[int], RankPieces]]:
    """Group the ranks whose holdings (or demands) are one shared object; return each group with that object."""
    ranks: dict[int, list[int]] = defaultdict(list)
    for rank, rank_pieces in sorted(pieces_by_rank.items(), key=lambda entry: entry[0]):
        ranks[id(rank_pieces)].append(rank)
    return [(group, pieces_by_rank[group[0]]) for group in ranks.values()]


def rank_groups(pieces_by_rank: Mapping[int, RankPieces]) -> list[Group]:
    """Return the groups of ranks that share one object, each with its signature."""
    return [(ranks, signature_of(rank_pieces)) for ranks, rank_pieces in group_ranks(pieces_by_rank)]


def select_tensors(pieces_by_rank: Mapping[int, RankPieces], names: Iterable[str]) -> dict[int, RankPieces]:
    """Keep only the pieces of these canonical tensors; ranks that shared an object share one again."""
    names = frozenset(names)
    selected: dict[int, RankPieces] = {}
    for ranks, rank_pieces in group_ranks(pieces_by_rank):
        part = replace(rank_pieces, pieces=tuple(p for p in rank_pieces.pieces if p.name in names))
        selected |= dict.fromkeys(ranks, part)
    return {rank: selected[rank] for rank in pieces_by_rank}


# Canonical tensors and the parameters of both engines name their layer in this form.
_LAYER = re.compile(r"\blayers\.(\d+)\.")


def layer_of(name: str) -> int | None:
    """Return the layer number in the name of a canonical or local tensor; None outside of all layers."""
    match = _LAYER.search(name)
    return int(match[1]) if match else None


def replicate_layer(
    pieces: Iterable[Piece], old: int, new: int, local: tuple[str, str] | None = None
) -> Iterator[Piece]:
    """Yield the pieces of layer `old` renamed to layer `new`.

    In local names `local[0]` is replaced by `local[1]`; by default the layer numbers as in canonical names.
    """
    canonical = f"layers.{old}.", f"layers.{new}."
    local = local or canonical
    for p in pieces:
        view = View(p.view.tensor.replace(*local, 1), p.view.offset, p.view.stride)
        yield Piece(p.name.replace(*canonical, 1), p.box, view, p.dtype)


def canonical_shapes(signatures: Iterable[Signature]) -> dict[str, tuple[int, ...]]:
    """Return the full shapes of the canonical tensors that these signatures hold together."""
    shapes: dict[str, tuple[int, ...]] = {}
    for signature in signatures:
        for boxes, names in signature.items():
            for name in names:
                for box, _ in boxes:
                    shapes[name] = tuple(map(max, shapes.get(name, box.stop), box.stop))
    return shapes
