"""Boxes against brute force: a box is a set of elements, and numpy's boolean masks count them.

The random layouts that the planner's and the executor's tests share are here too: grids of boxes, held and wanted.
"""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid3d.reshard.plan.box import Box
from hybrid3d.reshard.plan.layout import ITEMSIZE, Demand, Holdings, Piece, View
from hybrid3d.reshard.plan.planner import Plan, Transfer

Shape = tuple[int, ...]

QUICK = settings(max_examples=60, deadline=None)
SHAPES = st.lists(st.integers(1, 6), min_size=0, max_size=4).map(tuple)


@st.composite
def box_in(draw: st.DrawFn, outer: Box) -> Box:
    """Draw a box of at least one element inside `outer`."""
    low = [draw(st.integers(a, b - 1)) for a, b in zip(outer.start, outer.stop, strict=True)]
    size = [draw(st.integers(1, b - a)) for a, b in zip(low, outer.stop, strict=True)]
    return Box(tuple(low), tuple(size))


@st.composite
def two_boxes(draw: st.DrawFn) -> tuple[Shape, Box, Box]:
    shape = draw(SHAPES)
    return shape, draw(box_in(Box.full(shape))), draw(box_in(Box.full(shape)))


@st.composite
def box_and_hole(draw: st.DrawFn) -> tuple[Shape, Box, Box]:
    shape = draw(SHAPES)
    box = draw(box_in(Box.full(shape)))
    return shape, box, draw(box_in(box))


def mask(shape: Shape, box: Box) -> np.ndarray:
    """Return a mask that is True at the elements of the box, by the definition in the class's docstring."""
    index = np.indices(shape)
    inside = np.ones(shape, dtype=bool)
    for d in range(len(shape)):
        inside &= (box.start[d] <= index[d]) & (index[d] < box.start[d] + box.size[d])
    return inside


def times_covered(shape: Shape, boxes: list[Box]) -> np.ndarray:
    return sum((mask(shape, box).astype(int) for box in boxes), np.zeros(shape, dtype=int))


@QUICK
@given(two_boxes())
def test_intersection_is_the_common_elements(case: tuple[Shape, Box, Box]) -> None:
    shape, a, b = case
    common = a.intersect(b)
    both = mask(shape, a) & mask(shape, b)
    assert (common is None) == (not both.any())
    assert common == b.intersect(a)
    if common is not None:
        assert (mask(shape, common) == both).all()


@QUICK
@given(two_boxes())
def test_contains_is_subset(case: tuple[Shape, Box, Box]) -> None:
    shape, a, b = case
    assert a.contains(b) == (not (mask(shape, b) & ~mask(shape, a)).any())
    assert a.contains(a)
    assert Box.full(shape).contains(a)


@QUICK
@given(box_and_hole())
def test_subtract_leaves_every_other_element_once(case: tuple[Shape, Box, Box]) -> None:
    shape, box, hole = case
    rest = box.subtract(hole)
    assert (times_covered(shape, rest) == (mask(shape, box) & ~mask(shape, hole))).all()
    assert all(part.numel > 0 for part in rest)
    assert len(rest) <= 2 * len(shape)


@QUICK
@given(two_boxes(), st.integers(1, 40))
def test_split_covers_once_within_the_limit_and_contiguously(case: tuple[Shape, Box, Box], limit: int) -> None:
    shape, box, _ = case
    parts = box.split(limit)
    assert all(1 <= part.numel <= limit for part in parts)
    assert (times_covered(shape, parts) == mask(shape, box)).all()
    # In row-major order of the box the parts are runs, one after the other: what is contiguous stays so.
    number = np.full(shape, -1)
    number[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))] = np.arange(box.numel).reshape(
        box.size
    )
    in_turn = np.concatenate([number[mask(shape, part)] for part in parts])
    assert in_turn.tolist() == list(range(box.numel))
    if box.numel <= limit:
        assert parts == [box]


@pytest.mark.parametrize(
    ("size", "limit", "parts"),
    [
        ((10, 6), 30, [(5, 6), (5, 6)]),  # whole rows, as many as fit
        ((10, 6), 29, [(4, 6), (4, 6), (2, 6)]),
        ((2, 6), 4, [(1, 4), (1, 2), (1, 4), (1, 2)]),  # a row is too long: it is cut itself
        ((1, 1, 6), 5, [(1, 1, 5), (1, 1, 1)]),
    ],
)
def test_split_takes_as_many_rows_as_fit(size: Shape, limit: int, parts: list[Shape]) -> None:
    assert [part.size for part in Box((3,) * len(size), size).split(limit)] == parts


@QUICK
@given(two_boxes())
def test_numel_and_stop(case: tuple[Shape, Box, Box]) -> None:
    shape, box, _ = case
    assert box.numel == mask(shape, box).sum()
    assert box.stop == tuple(a + n for a, n in zip(box.start, box.size, strict=True))
    assert Box.full(shape) == Box((0,) * len(shape), shape)
    assert mask(shape, Box.full(shape)).all()


def test_scalar_is_one_element() -> None:
    scalar = Box.full(())
    assert scalar.numel == 1
    assert scalar.intersect(scalar) == scalar
    assert scalar.subtract(scalar) == []
    assert scalar.split(1) == [scalar]


def test_boxes_of_different_rank_do_not_mix() -> None:
    with pytest.raises(ValueError, match="zip"):
        Box((0, 0), (2, 2)).intersect(Box((0, 0, 0), (2, 2, 2)))
    with pytest.raises(ValueError, match="zip"):
        Box((0, 0), (2, 2)).contains(Box((0, 0, 0), (2, 2, 2)))


class Side:
    """A builder of what ranks hold, or want; each rank has one flat memory per dtype for its pieces."""

    def __init__(self, ranks: int):
        self.pieces: dict[int, list[Piece]] = {rank: [] for rank in range(ranks)}
        self.length: dict[tuple[int, str], int] = defaultdict(int)  # elements of a rank's memory, by rank and dtype

    def add(
        self,
        rank: int,
        name: str,
        box: Box,
        dtype: str = "float32",
        order: Shape | None = None,
        gap: int = 0,
    ) -> None:
        """Append a piece to a rank; dims lie in memory in this order, outermost first, with a `gap` after each row."""
        stride, step = [0] * len(box.size), 1
        for d in reversed(range(len(box.size)) if order is None else order):
            stride[d], step = step, step * (box.size[d] + (gap if step == 1 else 0))
        self.pieces[rank].append(Piece(name, box, View(dtype, self.length[rank, dtype], tuple(stride)), dtype))
        self.length[rank, dtype] += step + gap


@dataclass
class World:
    """A reshard to be planned: canonical tensors, and what ranks hold and want of them."""

    shapes: dict[str, Shape]
    held: Side
    wanted: Side

    @property
    def holdings(self) -> dict[int, Holdings]:
        return {rank: Holdings(tuple(pieces)) for rank, pieces in self.held.pieces.items()}

    @property
    def demand(self) -> dict[int, Demand]:
        return {rank: Demand(tuple(pieces)) for rank, pieces in self.wanted.pieces.items()}

    def has(self, side: Side, rank: int, name: str) -> np.ndarray:
        """Return a mask that is True at the elements of a canonical tensor that a rank has."""
        has = np.zeros(self.shapes[name], dtype=bool)
        for piece in side.pieces[rank]:
            if piece.name == name:
                has[index(piece.box)] = True
        return has

    def must_receive(self, rank: int) -> int:
        """Return the bytes of the elements that a rank wants and does not hold, counted one by one."""
        itemsize = {p.name: ITEMSIZE[p.dtype] for p in self.wanted.pieces[rank]}
        return sum(
            int((self.has(self.wanted, rank, name) & ~self.has(self.held, rank, name)).sum()) * itemsize[name]
            for name in itemsize
        )


def index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(box.start, box.size, strict=True))


def addresses(piece: Piece) -> np.ndarray:
    """Return the address of each element of a piece in local memory, in elements."""
    at = np.full(piece.box.size, piece.view.offset)
    for d, stride in enumerate(piece.view.stride):
        at += stride * np.arange(piece.box.size[d]).reshape([-1 if e == d else 1 for e in range(at.ndim)])
    return at


def transfers_of(plan: Plan) -> list[Transfer]:
    """Return every transfer once, after checking that only its two ends have it in their plans."""
    sent, arriving = Counter[Transfer](), Counter[Transfer]()
    for rank, part in plan.items():
        assert part.rank == rank
        assert all(rank in (t.src, t.dst) for t in part.transfers)
        sent.update(t for t in part.transfers if t.src == rank)
        arriving.update(t for t in part.transfers if t.dst == rank)
    assert sent == arriving
    assert set(sent.values()) <= {1}
    return list(arriving)


def check_moves(world: World, plan: Plan) -> None:
    """Check a plan on numbered elements: each wanted address is written once, with the right element."""
    number, total = {}, 0
    for name, shape in world.shapes.items():
        number[name] = total + np.arange(math.prod(shape)).reshape(shape)
        total += math.prod(shape)
    memory, truth = ({k: np.full(n, -1) for k, n in side.length.items()} for side in (world.held, world.wanted))
    for content, side in ((memory, world.held), (truth, world.wanted)):
        for rank, pieces in side.pieces.items():
            for p in pieces:
                content[rank, p.view.tensor][addresses(p)] = number[p.name][index(p.box)]
    landed = {k: np.full(n, -1) for k, n in world.wanted.length.items()}
    writes = {k: np.zeros(n, dtype=int) for k, n in world.wanted.length.items()}
    for t in sorted(transfers_of(plan), key=lambda t: t.relayed):  # what is handed on has landed before
        assert {(p.name, p.box) for p in (t.source, t.target)} == {(t.name, t.box)}
        assert t.dtype == t.target.dtype
        there = t.dst, t.target.view.tensor
        read = landed if t.relayed else memory
        landed[there][addresses(t.target)] = read[t.src, t.source.view.tensor][addresses(t.source)]
        writes[there][addresses(t.target)] += 1
    for there, expected in truth.items():
        assert landed[there].tolist() == expected.tolist()
        assert writes[there].tolist() == (expected != -1).astype(int).tolist()


def random_grid(random: Random, shape: Shape) -> list[Box]:
    """Return the boxes of a random grid that divides a tensor."""
    edges = [sorted({0, n, *random.choices(range(n + 1), k=random.randint(0, 2))}) for n in shape]
    ranges = [list(itertools.pairwise(e)) for e in edges]
    return [Box(tuple(a for a, _ in r), tuple(b - a for a, b in r)) for r in itertools.product(*ranges)]


# Before the names of tensors. Layer 10 comes after layer 2.
LAYERS = ("", "layers.0.", "layers.2.", "layers.10.")


@st.composite
def worlds(draw: st.DrawFn, layers: Sequence[str] = LAYERS) -> World:
    """Draw a world in which holders have one random grid of each tensor, and readers another.

    Tensors are in different layers, or in none. Boxes have replicas and one rank's boxes may overlap; pieces lie in
    memory in any order of dims, with or without gaps. The details come from one seed, which is much faster to draw.
    """
    ranks = draw(st.integers(1, 5))
    sizes = [draw(st.lists(st.integers(1, 7), max_size=3).map(tuple)) for _ in range(draw(st.integers(1, 4)))]
    random = Random(draw(st.integers(0, 1 << 30)))
    shapes = {f"{random.choice(layers)}t{i}": size for i, size in enumerate(sizes)}
    world = World(shapes, Side(ranks), Side(ranks))
    for name, shape in shapes.items():
        ours, theirs = random.choices(["float32", "bfloat16"], k=2)
        for side, dtype, fewest in ((world.held, ours, 1), (world.held, ours, 0), (world.wanted, theirs, 0)):
            for box in random_grid(random, shape):
                for rank in random.sample(range(ranks), random.randint(fewest, min(3, ranks))):
                    order = random.choice([None, tuple(random.sample(range(len(shape)), len(shape)))])
                    side.add(rank, name, box, dtype, order, random.choice([0, 0, 1]))
    for pieces in world.wanted.pieces.values():
        random.shuffle(pieces)
    return world
