"""Pieces and recorded copies against torch: the boxes of `boxes_of_copy` must copy what `dst.copy_(src)` copies."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid3d.reshard.plan.box import Box
from hybrid3d.reshard.plan.layout import ITEMSIZE, Piece, View, boxes_of_copy, contiguous_stride
from test_reshard_box import box_in

Shape = tuple[int, ...]
Boxes = list[tuple[Box, int, tuple[int, ...]]]
Case = tuple[torch.Tensor, torch.Tensor]

SHAPES = st.lists(st.sampled_from([8, 6, 4, 12, 3, 1]), min_size=1, max_size=3).map(tuple)


def permute(draw: st.DrawFn, x: torch.Tensor) -> torch.Tensor:
    return x.permute(draw(st.permutations(range(x.ndim))))


def split_dim(draw: st.DrawFn, x: torch.Tensor) -> torch.Tensor:
    dim = draw(st.integers(0, x.ndim - 1))
    outer = draw(st.sampled_from([n for n in range(x.shape[dim], 0, -1) if x.shape[dim] % n == 0]))
    return x.unflatten(dim, (outer, x.shape[dim] // outer))


def narrow(draw: st.DrawFn, x: torch.Tensor) -> torch.Tensor:
    dim = draw(st.integers(0, x.ndim - 1))
    start = draw(st.integers(0, (x.shape[dim] - 1) // 2))
    return x.narrow(dim, start, draw(st.integers((x.shape[dim] - start + 1) // 2, x.shape[dim] - start)))


def chunk(draw: st.DrawFn, x: torch.Tensor) -> torch.Tensor:
    dim = draw(st.integers(0, x.ndim - 1))
    return draw(st.sampled_from(x.chunk(draw(st.integers(2, 3)), dim)))


def select(draw: st.DrawFn, x: torch.Tensor) -> torch.Tensor:
    dim = draw(st.integers(0, x.ndim - 1))
    return x.select(dim, draw(st.integers(0, x.shape[dim] - 1)))


def skip(draw: st.DrawFn, x: torch.Tensor) -> torch.Tensor:
    """Draw a slice with a step, such as x[::2], along any dim and from any index."""
    dim = draw(st.integers(0, x.ndim - 1))
    step = draw(st.integers(2, 3))
    index = [slice(None)] * x.ndim
    index[dim] = slice(draw(st.integers(0, min(step, x.shape[dim]) - 1)), None, step)
    return x[tuple(index)]


def merge(draw: st.DrawFn, x: torch.Tensor) -> torch.Tensor:
    """Merge two neighbouring dims, where torch can do it without a copy."""
    if x.ndim < 2:
        return x
    dim = draw(st.integers(0, x.ndim - 2))
    try:
        return x.view(*x.shape[:dim], x.shape[dim] * x.shape[dim + 1], *x.shape[dim + 2 :])
    except RuntimeError:
        return x


# Two kinds of chains that never run over the edge of a dim of the canonical tensor: those that merge no dims, and
# those that cut nothing after dims were merged. All others may be boxes or not.
CUTS = [skip, split_dim, select, narrow, permute, chunk]
RANGES = [narrow, chunk, select]
SPLITS = [split_dim, permute]
MERGES = [merge, permute]
ANY = [*MERGES, *CUTS]


@st.composite
def chains(draw: st.DrawFn, *stages: list) -> Case:
    """Draw a canonical tensor of distinct values and a view of it, by up to three ops of each stage."""
    shape = draw(SHAPES)
    canonical = torch.arange(math.prod(shape)).view(shape)
    view = canonical
    for stage in stages:
        for op in draw(st.lists(st.sampled_from(stage), min_size=1, max_size=3)):
            view = op(draw, view) if view.ndim else view
    return canonical, view


@st.composite
def destination_like(draw: st.DrawFn, source: torch.Tensor) -> torch.Tensor:
    """Draw a view of the source's shape in local memory, with any order of dims, gaps and offset, filled with -1."""
    order = draw(st.permutations(range(source.ndim)))
    gaps = [draw(st.sampled_from([0, 0, 0, 1])) for _ in order]
    padded = [source.shape[d] + gap for d, gap in zip(order, gaps, strict=True)]
    step = draw(st.sampled_from([1, 1, 2]))
    start = draw(st.integers(0, 3))
    memory = torch.full((start + step * math.prod(padded),), -1)
    view = memory[start::step].view(padded)[tuple(slice(0, source.shape[d]) for d in order)]
    return view.permute([order.index(d) for d in range(source.ndim)])


def boxes(canonical: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> Boxes:
    """Call `boxes_of_copy` as the recorder does."""
    return boxes_of_copy(
        tuple(canonical.shape),
        tuple(source.shape),
        (source.storage_offset(), source.stride()),
        (target.storage_offset(), target.stride()),
    )


def memory_of(view: torch.Tensor) -> torch.Tensor:
    """Return the flat memory of a view."""
    return view.as_strided((view.untyped_storage().nbytes() // view.itemsize,), (1,), 0)


def check_replay(canonical: torch.Tensor, source: torch.Tensor, target: torch.Tensor, found: Boxes) -> None:
    """Check that writing the boxes changes memory as `copy_` does, gaps included, and writes no element twice."""
    replayed = memory_of(target).clone()
    writes = torch.zeros_like(replayed)
    for box, offset, stride in found:
        assert Box.full(tuple(canonical.shape)).contains(box)
        assert box.numel > 0
        values = canonical[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))]
        replayed.as_strided(box.size, stride, offset).copy_(values)
        writes.as_strided(box.size, stride, offset).add_(1)
    target.copy_(source)
    assert replayed.equal(memory_of(target))
    assert writes.equal((replayed != -1).long())
    assert writes.sum() == source.numel()


@settings(max_examples=120, deadline=None)
@given(st.one_of(chains(CUTS), chains(RANGES, SPLITS, MERGES)), st.data())
def test_views_along_the_dims_are_boxes(case: Case, data: st.DataObject) -> None:
    canonical, source = case
    target = data.draw(destination_like(source))
    check_replay(canonical, source, target, boxes(canonical, source, target))


@settings(max_examples=120, deadline=None)
@given(chains(MERGES, ANY, ANY), st.data())
def test_boxes_of_copy_replay_any_view_exactly_or_refuse(case: Case, data: st.DataObject) -> None:
    canonical, source = case
    target = data.draw(destination_like(source))
    try:
        found = boxes(canonical, source, target)
    except ValueError:
        return  # that it refuses no more than it may is the test above
    check_replay(canonical, source, target, found)


X = torch.arange(4 * 6).view(4, 6)


@pytest.mark.parametrize(
    ("source", "target", "count"),
    [
        (X, torch.full((4, 6), -1), 1),
        (X[1:3], torch.full((2, 6), -1), 1),
        (X.t(), torch.full((6, 4), -1), 1),  # a transpose is the box with its strides in the other order
        (X[:, 2], torch.full((4,), -1), 1),
        (X[3, 2], torch.full((5,), -1)[3], 1),
        (X.view(-1), torch.full((24,), -1), 1),  # merged dims
        (X[1:3].view(12), torch.full((2, 6), -1).view(12), 1),
        (X.view(2, 2, 6), torch.full((2, 2, 6), -1), 1),  # a split dim
        (X.view(2, 2, 6).transpose(0, 1), torch.full((2, 2, 6), -1).transpose(0, 1), 1),  # in whatever order
        (X, torch.full((4, 8), -1)[:, 1:7], 1),
        (X.view(2, 2, 6)[:, 1], torch.full((2, 6), -1), 2),  # rows 1 and 3
        (X[::2], torch.full((2, 6), -1), 2),
        (X[:, 1::3], torch.full((4, 2), -1), 2),
        (X.view(2, 2, 6), torch.full((2, 3, 6), -1)[:, 1:], 2),  # a gap in the destination alone
        (X[2:2], torch.full((0, 6), -1), 0),  # nothing: the shard of a rank that has none
    ],
)
def test_number_of_boxes(source: torch.Tensor, target: torch.Tensor, count: int) -> None:
    found = boxes(X, source, target)
    assert len(found) == count
    check_replay(X, source, target, found)


def test_dims_of_one_and_scalars() -> None:
    for shape in [(), (1,), (1, 3, 1), (3, 1)]:
        canonical = torch.arange(math.prod(shape)).view(shape)
        for source in (canonical, canonical.view(-1), canonical.squeeze()):
            target = torch.full(source.shape, -1)
            found = boxes(canonical, source, target)
            assert [box for box, _, _ in found] == [Box.full(shape)]
            check_replay(canonical, source, target, found)


@pytest.mark.parametrize(
    "source",
    [
        X.diagonal(),
        X.view(-1)[:9],  # a row and a half
        X.view(-1)[3:15],  # runs from the middle of a row to the middle of another
        X.view(-1)[1:9].view(2, 4),  # each half fits behind the start of a row, both together do not
        X.view(-1)[1:9].view(2, 4).t(),
        X.view(-1)[::5],  # never the same column
        X.view(-1)[::7],
        X[:, :1].expand(4, 6),  # one element read six times
    ],
)
def test_view_that_is_no_box_is_refused(source: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"is no box|runs along no dim"):
        boxes(X, source, torch.empty(source.shape))


@st.composite
def pieces(draw: st.DrawFn) -> tuple[torch.Tensor, Piece]:
    """Draw a local tensor of distinct values and a piece with any view of it."""
    _, source = draw(chains(CUTS))
    view = draw(destination_like(source))
    memory = memory_of(view).copy_(torch.arange(len(memory_of(view))))
    start = tuple(draw(st.integers(0, 5)) for _ in range(view.ndim))
    box = Box(start, tuple(view.shape))
    return memory, Piece("canonical", box, View("local", view.storage_offset(), view.stride()), "bfloat16")


def read(memory: torch.Tensor, piece: Piece) -> torch.Tensor:
    return memory.as_strided(piece.box.size, piece.view.stride, piece.view.offset)


@settings(max_examples=80, deadline=None)
@given(pieces(), st.data())
def test_part_is_the_slice_of_the_view(case: tuple[torch.Tensor, Piece], data: st.DataObject) -> None:
    memory, piece = case
    box = data.draw(box_in(piece.box))
    index = tuple(slice(a - o, b - o) for a, b, o in zip(box.start, box.stop, piece.box.start, strict=True))
    part = piece.restrict(box)
    assert part.box == box
    assert read(memory, part).equal(read(memory, piece)[index])
    assert replace(part, box=piece.box, view=piece.view) == piece  # nothing else changes
    inner = data.draw(box_in(box))
    assert part.restrict(inner) == piece.restrict(inner)


@settings(max_examples=120, deadline=None)
@given(pieces())
def test_contiguous_as_torch_says(case: tuple[torch.Tensor, Piece]) -> None:
    memory, piece = case
    assert piece.contiguous == read(memory, piece).is_contiguous()
    assert piece.nbytes == piece.box.numel * 2


@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (4, 1, 3), (1, 1)])
def test_contiguous_stride_as_torch_says(shape: Shape) -> None:
    assert contiguous_stride(shape) == torch.empty(shape).stride()


def test_item_sizes_are_torch_s() -> None:
    assert {name: getattr(torch, name).itemsize for name in ITEMSIZE} == ITEMSIZE
