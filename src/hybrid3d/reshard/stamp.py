"""One layer stands for all that are like it: its pieces, renamed; one tensor for all that move alike: the plan of one.

An engine is asked about one layer of each kind. A plan is made for one tensor of each class: whatever tensors the same
ranks hold and want in the same boxes take the same way.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TypeVar

from hybrid3d.reshard.layout import Demand, Holdings, Piece, View

# As canonical tensors and the parameters of both engines have it in their names.
_LAYER = re.compile(r"\blayers\.(\d+)\.")

Side = TypeVar("Side", Holdings, Demand)


def layer_of(name: str) -> int | None:
    """The number of the layer that a canonical or local tensor belongs to; None where it is in none."""
    match = _LAYER.search(name)
    return int(match[1]) if match else None


def stamped(pieces: Iterable[Piece], old: int, new: int, local: tuple[str, str] | None = None) -> Iterator[Piece]:
    """Pieces of layer `old` as those of layer `new`.

    Args:
        local: what stands in the local names for `layers.<old>.`, and what is put there; the same where not said.
    """
    canonical = f"layers.{old}.", f"layers.{new}."
    local = local or canonical
    for p in pieces:
        view = View(p.view.tensor.replace(*local, 1), p.view.offset, p.view.stride)
        yield Piece(p.name.replace(*canonical, 1), p.box, view, p.dtype, p.in_place)


def alike(holdings: Mapping[int, Holdings], demand: Mapping[int, Demand]) -> dict[str, int]:
    """The first canonical tensor of each class, and how many tensors are in it.

    Of one class are tensors of which every rank holds the same boxes and wants the same boxes, in the same dtypes:
    where one moves, all move alike. Where they lie locally does not count.
    """
    where: dict[str, list[object]] = defaultdict(list)
    sides: list[tuple[list[int], Holdings | Demand]] = [*distinct(holdings), *distinct(demand)]
    for ranks, side in sides:
        for p in side.pieces:
            where[p.name].append((type(side), ranks[0], p.box, p.dtype))
    classes = {name: tuple(boxes) for name, boxes in where.items()}
    first = {boxes: name for name, boxes in reversed(classes.items())}
    return dict(Counter(first[boxes] for boxes in classes.values()))


def distinct(sides: Mapping[int, Side]) -> list[tuple[list[int], Side]]:
    """What ranks have, once for all ranks that share it (as one object), with those ranks."""
    ranks: dict[int, list[int]] = defaultdict(list)
    for rank, side in sides.items():
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
