"""Runs of elements: the boxes that travel together, one behind the other, each in row-major order.

The elements of a run that changed are found, read and written with a few operations for the whole run, however many
boxes it has: equal boxes at equal distances in memory, such as those of the experts of a layer, are one view.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import torch

from hybrid3d.reshard.delta.encoding import Changes, count_bits, set_bits
from hybrid3d.reshard.move.memory import BatchedCopies, merge_consecutive
from hybrid3d.reshard.plan.box import Box
from hybrid3d.reshard.plan.classes import natural_sort_key
from hybrid3d.reshard.plan.layout import Piece, Shape, contiguous_stride

RunOrder = tuple[Shape, str, list[tuple[int, str]], Shape]


def order_in_run(name: str, box: Box) -> RunOrder:
    """Return the sort key of the boxes of a run, which both of its ends know.

    Equal boxes of one kind of tensor come together, because their memory may be equally spaced.
    """
    return box.size, re.sub(r"\d+", "", name), natural_sort_key(name), box.start


class Elements:
    """The elements of views of memory, one view behind the other."""

    def __init__(self, views: Sequence[torch.Tensor]):
        self._views = [view for (view,) in merge_consecutive([(view,) for view in views])]
        starts = [0, *accumulate(view.numel() for view in self._views)]
        self._starts = torch.tensor(starts, device=views[0].device)

    def gather(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the elements at these positions [k] of the run, ascending."""
        found = [gather_elements(view, at) for view, at, _ in self._by_view(positions)]
        return found[0] if len(found) == 1 else torch.cat(found)

    def scatter(self, positions: torch.Tensor, values: torch.Tensor) -> None:
        """Write values [k] at these positions [k] of the run, ascending."""
        for view, at, of_view in self._by_view(positions):
            scatter_elements(view, at, values[of_view].to(view.dtype))

    def _by_view(self, positions: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor, slice]]:
        """Yield (view, positions in it, which of the positions they are) of views with a position; of one at least."""
        if len(self._views) == 1 or not len(positions):
            yield self._views[0], positions, slice(None)
            return
        ends = split_positions(positions, self._starts)
        for number, (low, high) in enumerate(pairwise(ends)):
            if low < high:
                yield self._views[number], positions[low:high] - self._starts[number], slice(low, high)


def split_positions(positions: torch.Tensor, starts: torch.Tensor) -> list[int]:
    """Return how many of the ascending positions lie before each start."""
    found: list[int] = torch.searchsorted(positions, starts).tolist()
    return found


class RunChanges:
    """Finds the changed elements of a run whose pieces this rank holds.

    Where the bits of all pieces are whole bytes, as in real models, they are copied one behind the other and searched
    at once; else piece by piece. They are copied to `bits`, of one bit an element, which several runs may share.
    """

    def __init__(self, pieces: Sequence[Piece], changes: Changes, bits: torch.Tensor):
        self._pieces, self._changes = pieces, changes
        starts = [0, *accumulate(piece.box.numel for piece in pieces)]
        self._starts = torch.tensor(starts, device=bits.device)
        views = [_bytes_of_bits(changes[piece.view.tensor], piece) for piece in pieces]
        self._copies: BatchedCopies | None = None
        if all(view is not None for view in views):
            self._copies, self._bits = BatchedCopies(), bits[: starts[-1] // 8]
            for view, start in zip(views, starts, strict=False):
                assert view is not None
                self._copies.add(bits[start // 8 :][: view.numel()].view(view.shape), view)
            self._copies.merge()

    def positions(self) -> torch.Tensor:
        """Return the positions of the changed elements in the run [k] int64, ascending."""
        if self._copies is not None:
            self._copies.run()
            return set_bits(self._bits)
        found = zip(self._pieces, self._starts, strict=False)
        return torch.cat([changed_positions(self._changes, piece) + start for piece, start in found])

    def count(self) -> torch.Tensor:
        """Return how many elements changed, as a tensor that need not be there yet."""
        if self._copies is not None:
            self._copies.run()
            return count_bits(self._bits)
        return torch.tensor(len(self.positions()), device=self._starts.device)

    def count_by_piece(self) -> list[int]:
        """Return how many elements of each piece changed."""
        return [high - low for low, high in pairwise(split_positions(self.positions(), self._starts))]


def _bytes_of_bits(bits: torch.Tensor, piece: Piece) -> torch.Tensor | None:
    """Return the bits of a piece as a view of bytes, in the order of its box; None if they are not whole bytes."""
    size, stride, first = piece.box.size, piece.view.stride, piece.view.offset
    if first % 8 or piece.box.numel % 8:
        return None
    if piece.contiguous:
        return bits[first // 8 : (first + piece.box.numel) // 8]
    if stride[-1] != 1 or size[-1] % 8 or any(n > 1 and s % 8 for n, s in zip(size[:-1], stride[:-1], strict=True)):
        return None
    outer = [s // 8 for s in stride[:-1]]
    return bits.as_strided((*size[:-1], size[-1] // 8), (*outer, 1), bits.storage_offset() + first // 8)


def changed_positions(changes: Changes, piece: Piece) -> torch.Tensor:
    """Return the positions of the changed elements of a piece, counted in the row-major order of its box, ascending."""
    strides = tuple(piece.view.stride)
    extent = 1 + sum((n - 1) * s for n, s in zip(piece.box.size, strides, strict=True))
    first = piece.view.offset
    bits = changes[piece.view.tensor][first >> 3 : (first + extent + 7) >> 3]
    found = set_bits(bits) - (first & 7)
    if first & 7:
        found = found[found >= 0]
    if (first + extent) & 7:
        found = found[found < extent]
    return found if piece.contiguous else _positions_in_box(found, piece.box.size, strides)


def _positions_in_box(found: torch.Tensor, size: Shape, strides: Shape) -> torch.Tensor:
    """Turn offsets in memory into positions in the box; offsets outside of the strided view are dropped."""
    dims = [(n, s, c) for n, s, c in zip(size, strides, contiguous_stride(size), strict=True) if n > 1]
    dims.sort(key=lambda dim: -dim[1])
    inside, rest, positions = torch.ones_like(found, dtype=torch.bool), found, torch.zeros_like(found)
    for n, stride, step in dims:
        index = rest.div(stride, rounding_mode="floor")
        rest = rest - index * stride
        inside &= index < n
        positions += index * step
    positions = positions[inside & (rest == 0)]
    in_order = all(a[2] > b[2] for a, b in pairwise(dims))
    return positions if in_order else positions.sort().values


def _in_memory(view: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the memory that a view spans, flat, and where in it the elements at these positions of the view lie."""
    if view.is_contiguous():
        return view.view(-1), positions
    offsets, rest = torch.zeros_like(positions), positions
    for stride, step in zip(view.stride(), contiguous_stride(view.shape), strict=True):
        index = rest.div(step, rounding_mode="floor")
        rest = rest - index * step
        offsets += index * stride
    extent = 1 + sum((n - 1) * s for n, s in zip(view.shape, view.stride(), strict=True))
    return view.as_strided((extent,), (1,), view.storage_offset()), offsets


def gather_elements(view: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return the elements of a strided view at these positions of its row-major order."""
    memory, at = _in_memory(view, positions)
    return memory[at]


def scatter_elements(view: torch.Tensor, positions: torch.Tensor, values: torch.Tensor) -> None:
    """Write values at these positions of a strided view's row-major order."""
    memory, at = _in_memory(view, positions)
    memory[at] = values
