"""The pieces of canonical tensors that a rank holds and wants, and where they lie in its memory."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from hybrid3d.reshard.plan.box import Box

ITEMSIZE = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1}

FILES = -1
"""The files of a checkpoint, as a rank of a plan."""

Shape = tuple[int, ...]


def contiguous_stride(shape: Shape) -> tuple[int, ...]:
    """Return the strides, in elements, of a contiguous tensor of this shape."""
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))


@dataclass(frozen=True, slots=True)
class View:
    """A strided view of a local tensor; its shape is the size of the box that is stored there.

    `tensor` is the local name of a parameter or buffer. `offset` and `stride` count elements from the tensor's first
    element.
    """

    tensor: str
    offset: int
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a canonical tensor, and the local memory that stores it."""

    name: str
    box: Box
    view: View
    dtype: str

    @property
    def nbytes(self) -> int:
        return self.box.numel * ITEMSIZE[self.dtype]

    @property
    def contiguous(self) -> bool:
        """Whether the local view is contiguous."""
        dims = [(n, s) for n, s in zip(self.box.size, self.view.stride, strict=True) if n > 1]
        return all(s == math.prod(n for n, _ in dims[i + 1 :]) for i, (_, s) in enumerate(dims))

    def restrict(self, box: Box) -> Piece:
        """Return the part of this piece that stores a box inside it."""
        steps = zip(box.start, self.box.start, self.view.stride, strict=True)
        offset = self.view.offset + sum((a - b) * s for a, b, s in steps)
        view = View(self.view.tensor, offset, self.view.stride)  # `dataclasses.replace` is several times slower
        return Piece(self.name, box, view, self.dtype)


def pieces_by_name(pieces: Iterable[Piece]) -> dict[str, list[Piece]]:
    """Group pieces by canonical tensor."""
    found: dict[str, list[Piece]] = defaultdict(list)
    for piece in pieces:
        found[piece.name].append(piece)
    return found


@dataclass(frozen=True, slots=True)
class Fill:
    """A constant that the engine's loader writes and no rank holds, such as vocabulary padding."""

    view: View
    size: Shape
    value: float


@dataclass(frozen=True)
class Holdings:
    """The pieces that a rank holds."""

    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Demand:
    """The pieces that a rank wants, and the constants that it fills in itself."""

    pieces: tuple[Piece, ...]
    fills: tuple[Fill, ...] = field(default=())


class LocalPieces:
    """Looks up the memory locations of boxes on the ranks whose holdings or demands are given, usually one rank."""

    def __init__(self, holdings: Mapping[int, Holdings], demand: Mapping[int, Demand]):
        self._held = _pieces_by_box(holdings)
        self._wanted = _pieces_by_box(demand)

    def source(self, rank: int, name: str, held: Box, box: Box) -> Piece | None:
        """Return the part `box` of the piece that the rank holds as `held`; None if its holdings are not given."""
        piece = self._held.get((rank, name, held))
        return None if piece is None else piece.restrict(box)

    def target(self, rank: int, name: str, wanted: Box, box: Box) -> Piece | None:
        """Return the part `box` of the piece that the rank wants as `wanted`; None if its demand is not given."""
        piece = self._wanted.get((rank, name, wanted))
        return None if piece is None else piece.restrict(box)


def _pieces_by_box(
    pieces_by_rank: Mapping[int, Holdings] | Mapping[int, Demand],
) -> dict[tuple[int, str, Box], Piece]:
    return {(rank, p.name, p.box): p for rank, rank_pieces in pieces_by_rank.items() for p in rank_pieces.pieces}


@dataclass(frozen=True, slots=True)
class _Axis:
    """One dim of a pair of views: its length, its stride in the canonical tensor and its stride in local memory."""

    length: int
    source: int
    target: int


def boxes_of_copy(
    shape: Shape, size: Shape, source: tuple[int, tuple[int, ...]], target: tuple[int, tuple[int, ...]]
) -> list[tuple[Box, int, tuple[int, ...]]]:
    """Express a copy between two strided views as boxes of the canonical tensor.

    `source` is (offset, stride) in the contiguous canonical tensor of `shape`, `target` is (offset, stride) in local
    memory, and both views have the shape `size`. Returns (box, local offset, local stride per canonical dim) for
    each box: one for slices, transposes and merged or split dims, more where the view skips indices.

    Raises:
        ValueError: the source view does not follow the dims of the canonical tensor.
    """
    if 0 in size:
        return []
    strides = contiguous_stride(shape)
    axes = [_Axis(n, s, t) for n, s, t in zip(size, source[1], target[1], strict=True) if n > 1]
    start = [source[0] // s % n if n > 1 else 0 for s, n in zip(strides, shape, strict=True)]
    by_dim: dict[int, list[_Axis]] = {}
    while axes:
        axis = axes.pop()
        dim = _dim_along(shape, strides, axis.source)
        step = axis.source // strides[dim]
        if start[dim] + (axis.length - 1) * step < shape[dim]:
            by_dim.setdefault(dim, []).append(axis)
            continue
        rows = shape[dim] // step  # the view continues into the next outer dim: split it there
        if start[dim] or shape[dim] % step or axis.length % rows:
            raise ValueError(f"a view of length {axis.length} and stride {axis.source} in shape {shape} is no box")
        axes.append(_Axis(axis.length // rows, axis.source * rows, axis.target * rows))
        axes.append(_Axis(rows, axis.source, axis.target))
    for dim, parts in by_dim.items():
        if start[dim] + sum((axis.length - 1) * axis.source // strides[dim] for axis in parts) >= shape[dim]:
            raise ValueError(f"a view of size {size} and strides {source[1]} in shape {shape} is no box")
    extent, along, separate = [1] * len(shape), [0] * len(shape), []
    for dim, parts in by_dim.items():
        for axis in sorted(parts, key=lambda a: a.source):
            if extent[dim] == 1 and axis.source == strides[dim]:
                extent[dim], along[dim] = axis.length, axis.target
            elif axis.source == strides[dim] * extent[dim] and axis.target == along[dim] * extent[dim]:
                extent[dim] *= axis.length
            else:
                separate.append(axis)  # one view skips indices: one box for each index
    boxes = []
    for index in itertools.product(*(range(axis.length) for axis in separate)):
        shifts = list(zip(index, separate, strict=True))
        first = source[0] + sum(i * axis.source for i, axis in shifts)
        corner = tuple(first // s % n if n > 1 else 0 for s, n in zip(strides, shape, strict=True))
        offset = target[0] + sum(i * axis.target for i, axis in shifts)
        boxes.append((Box(corner, tuple(extent)), offset, tuple(along)))
    return boxes


def _dim_along(shape: Shape, strides: tuple[int, ...], stride: int) -> int:
    """Return the dim of the canonical tensor along which a step of `stride` elements moves."""
    for dim, s in enumerate(strides):
        if shape[dim] > 1 and 0 < s <= stride and stride % s == 0:
            return dim
    raise ValueError(f"a stride of {stride} elements runs along no dim of shape {shape}")
