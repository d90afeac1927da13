"""Runs of elements: the boxes that travel together, one behind the other, each in row-major order.

The elements of a run that changed are found, read and written with a few operations for the whole run, however many
boxes it has: equal boxes at equal distances in memory, such as those of the experts of a layer, are one view.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch

from hybrid3d.reshard.bitmap import count_bits, set_bits
from hybrid3d.reshard.changes import Changes, changed_positions, gather_elements, scatter_elements
from hybrid3d.reshard.copies import BatchedCopies
from hybrid3d.reshard.layout import Piece


class Elements:
    """The elements of views of memory, one view behind the other."""

    def __init__(self, views: Sequence[torch.Tensor]):
        self._views = list(_merge(views))
        self._starts = [0, *accumulate(view.numel() for view in self._views)]

    def gather(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the elements at these positions [k] of the run, ascending."""
        found = [gather_elements(view, at) for view, at, _ in self._by_view(positions)]
        return found[0] if len(found) == 1 else torch.cat(found)

    def scatter(self, positions: torch.Tensor, values: torch.Tensor) -> None:
        """Write values [k] at these positions [k] of the run, ascending."""
        for view, at, of_view in self._by_view(positions):
            scatter_elements(view, at, values[of_view].to(view.dtype))

    def _by_view(self, positions: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor, slice]]:
        """Yield (view, positions in it, which of the positions they are)."""
        if len(self._views) == 1:
            yield self._views[0], positions, slice(None)
            return
        ends = split_positions(positions, self._starts)
        for view, start, low, high in zip(self._views, self._starts, ends, ends[1:], strict=False):
            yield view, positions[low:high] - start, slice(low, high)


def split_positions(positions: torch.Tensor, starts: Sequence[int]) -> list[int]:
    """Return how many of the ascending positions lie before each start."""
    found: list[int] = torch.searchsorted(positions, torch.tensor(starts, device=positions.device)).tolist()
    return found


def _merge(views: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the views, of which consecutive equal ones at equal distances are merged into one with one dim more."""
    first = 0
    while first < len(views):
        step, last = _step(views, first), first + 1
        while last < len(views) and step is not None and _step(views, last - 1) == step:
            last += 1
        one = views[first]
        yield (
            one
            if step is None
            else one.as_strided((last - first, *one.shape), (step, *one.stride()), one.storage_offset())
        )
        first = last


def _step(views: Sequence[torch.Tensor], index: int) -> int | None:
    """Return how far the next view lies behind this one, in elements; None if it is not such a view."""
    if index + 1 == len(views):
        return None
    one, other = views[index], views[index + 1]
    same = one.shape == other.shape and one.stride() == other.stride() and one.dtype == other.dtype
    if not same or one.untyped_storage()._cdata != other.untyped_storage()._cdata:
        return None
    step = int(other.storage_offset() - one.storage_offset())
    return step if step > 0 else None


class RunChanges:
    """Finds which elements of a run changed: of pieces that lie in memory in the order of the run.

    Where all pieces begin at multiples of eight elements, as those of real models do, their bits are copied one behind
    the other and searched at once; else piece by piece.

    Args:
        bits: scratch memory [n / 8], which several runs may share.
    """

    def __init__(self, pieces: Sequence[Piece], changes: Changes, bits: torch.Tensor):
        self._pieces, self._changes = pieces, changes
        self._starts = [0, *accumulate(piece.box.numel for piece in pieces)]
        views = [_bytes_of_bits(changes[piece.view.tensor], piece) for piece in pieces]
        self._copies: BatchedCopies | None = None
        self._device = bits.device
        if all(view is not None for view in views):
            self._copies, self._bits = BatchedCopies(), bits[: self._starts[-1] // 8]
            for view, start in zip(views, self._starts, strict=False):
                assert view is not None
                self._copies.add(bits[start // 8 :][: view.numel()].view(view.shape), view)

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
        return torch.tensor(sum(self.count_by_piece()), device=self._device)

    def count_by_piece(self) -> list[int]:
        """Return how many elements of each piece changed."""
        return [len(changed_positions(self._changes, piece)) for piece in self._pieces]


def _bytes_of_bits(bits: torch.Tensor, piece: Piece) -> torch.Tensor | None:
    """Return the bits of a piece as a view of bytes, in the order of its box; None if they are not whole bytes."""
    size, stride = piece.box.size, piece.view.stride
    if not size or stride[-1] != 1 or size[-1] % 8 or piece.view.offset % 8:
        return None
    if any(n > 1 and s % 8 for n, s in zip(size[:-1], stride[:-1], strict=True)):
        return None
    outer = [s // 8 for s in stride[:-1]]
    return bits.as_strided((*size[:-1], size[-1] // 8), (*outer, 1), bits.storage_offset() + piece.view.offset // 8)
