"""Axis-aligned boxes in a canonical tensor: the unit in which weights are held, wanted and moved."""

from __future__ import annotations

import functools
import math
import operator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle of a tensor: `start[d] <= index[d] < start[d] + size[d]` in every dim `d`."""

    start: tuple[int, ...]
    size: tuple[int, ...]

    @classmethod
    def full(cls, shape: tuple[int, ...]) -> Box:
        """Return the box that covers a tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def stop(self) -> tuple[int, ...]:
        """The exclusive end index in each dim."""
        return tuple(map(operator.add, self.start, self.size))

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    def intersect(self, other: Box) -> Box | None:
        """Return the intersection with another box of the same tensor, or None where it is empty."""
        start = tuple([max(a, b) for a, b in zip(self.start, other.start, strict=True)])
        size = tuple(map(operator.sub, map(min, self.stop, other.stop), start))
        return Box(start, size) if min(size, default=1) > 0 else None

    def overlaps(self, other: Box) -> bool:
        """Return whether two non-empty boxes of the same tensor intersect."""
        ends = zip(self.start, self.size, other.start, other.size, strict=True)
        return all(a < b + m and b < a + n for a, n, b, m in ends)

    def contains(self, other: Box) -> bool:
        """Return whether another box of the same tensor lies inside this one."""
        ends = zip(self.start, self.size, other.start, other.size, strict=True)
        return all(a <= b and b + m <= a + n for a, n, b, m in ends)

    def subtract(self, hole: Box) -> list[Box]:
        """Return disjoint boxes that cover this box minus `hole`, which must lie inside it."""
        rest = []
        start, stop = list(self.start), list(self.stop)
        for d in range(len(start)):
            for low, high in ((start[d], hole.start[d]), (hole.stop[d], stop[d])):
                if low < high:
                    size = [b - a for a, b in zip(start, stop, strict=True)]
                    size[d] = high - low
                    rest.append(Box((*start[:d], low, *start[d + 1 :]), tuple(size)))
            start[d], stop[d] = hole.start[d], hole.stop[d]
        return rest

    def without(self, other: Box) -> list[Box]:
        """Return disjoint boxes that cover this box minus another, which may lie anywhere in the tensor."""
        common = self.intersect(other)
        return [self] if common is None else self.subtract(common)

    def split_evenly(self, count: int) -> list[Box]:
        """Split the box into `count` boxes of nearly equal size, along the outermost dim that is long enough.

        If no dim is, the box is split into single indices of its longest dim: fewer boxes than `count`.
        """
        count = min(count, max(self.size, default=1))
        if count <= 1:
            return [self]
        dim = next(d for d, n in enumerate(self.size) if n >= count)
        edges = [self.size[dim] * i // count for i in range(count + 1)]
        return [self._between(dim, low, high) for low, high in pairwise(edges)]

    def split(self, limit: int) -> list[Box]:
        """Split the box along its outermost dims into contiguous boxes of at most `limit` elements."""
        if self.numel <= limit:
            return [self]
        dim = next(d for d, n in enumerate(self.size) if n > 1)
        row = self.numel // self.size[dim]
        step = max(1, limit // row)
        edges = [*range(0, self.size[dim], step), self.size[dim]]
        return [part for low, high in pairwise(edges) for part in self._between(dim, low, high).split(limit)]

    def _between(self, dim: int, low: int, high: int) -> Box:
        """Return the part between two indices along a dim, which count from where the box starts."""
        start = (*self.start[:dim], self.start[dim] + low, *self.start[dim + 1 :])
        return Box(start, (*self.size[:dim], high - low, *self.size[dim + 1 :]))


@functools.lru_cache(1 << 16)
def union_numel(boxes: tuple[Box, ...], excluded: tuple[Box, ...] = ()) -> int:
    """Return the number of elements in the union of `boxes` minus the union of `excluded`.

    The elements are counted on the grid of all box edges (coordinate compression).
    """
    if not boxes:
        return 0
    if len(boxes) == 1 and not excluded:
        return boxes[0].numel
    all_boxes = [*boxes, *excluded]
    edges = [np.unique([e for b in all_boxes for e in (b.start[d], b.stop[d])]) for d in range(len(boxes[0].size))]
    covered = np.zeros([len(e) for e in edges], dtype=bool)
    for value, group in ((True, boxes), (False, excluded)):
        for box in group:
            cells = (np.searchsorted(e, ab) for e, ab in zip(edges, zip(box.start, box.stop, strict=True), strict=True))
            covered[tuple(slice(a, b) for a, b in cells)] = value
    for dim, e in enumerate(edges):
        covered = covered * np.append(np.diff(e), 0).reshape([-1 if d == dim else 1 for d in range(len(edges))])
    return int(covered.sum())
