"""A rank's weights in FP8, which it makes anew from its own weights before each sync, and which of them changed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch

from hybrid3d.reshard.delta.changes import Changes, num_bytes, pack_bits
from hybrid3d.reshard.ends import ChangeSource
from hybrid3d.reshard.fp8 import (
    BLOCK,
    IsQuantized,
    Region,
    SplitBlocks,
    kind_of,
    quantize,
    quantized_holdings,
    regions_of,
)
from hybrid3d.reshard.move.memory import DeviceBuffer, align_up, strided_view
from hybrid3d.reshard.plan.layout import Holdings, Piece


class QuantizedWeights:
    """The FP8 values and scales of the quantized tensors that a rank holds, beside its other weights.

    Attributes:
        pieces: what the rank has to send.
        tensors: by local name, its own tensors, and those of FP8 values and scales; these are allocated only between
            `allocate` and `release`.
    """

    def __init__(
        self,
        pieces: Iterable[Piece],
        tensors: Mapping[str, torch.Tensor],
        is_quantized: IsQuantized,
        device: torch.device | str,
        keep: bool,
    ):
        """
        Args:
            pieces: of the rank's own tensors, before quantization.
            keep: the memory from sync to sync, so that it is known which values changed.
        """
        pieces = tuple(pieces)
        self.pieces = quantized_holdings(Holdings(pieces), is_quantized).pieces
        self._own, self._keeps = tensors, keep
        self._regions = regions_of(pieces, is_quantized)
        sizes = [size for region in self._regions for size in (region.box.numel, 4 * region.grid.numel)]
        self._buffer = DeviceBuffer(sum(map(align_up, sizes)), device)
        self._made: dict[str, torch.Tensor] = {}
        at = 0
        for region in self._regions:
            for name, box, dtype in (
                (region.local, region.box, torch.float8_e4m3fn),
                (region.local_scales, region.grid, torch.float32),
            ):
                nbytes = box.numel * dtype.itemsize
                self._made[name] = self._buffer.flat_view(at, nbytes, dtype).view(box.size)
                at += align_up(nbytes)
        self.tensors = {**tensors, **self._made}
        self._bits = {
            name: torch.zeros(num_bytes(made.numel()), dtype=torch.uint8, device=device)
            for name, made in self._made.items()
            if keep
        }
        self._split: Mapping[str, SplitBlocks] = {}
        self._rounded_scales: Collection[str] = ()
        self._largest: dict[str, torch.Tensor] = {}  # of the blocks of regions with split blocks
        self._pending: list[Region] = []
        if not keep:
            self._buffer.release()

    @property
    def nbytes(self) -> int:
        """The memory of values and scales."""
        return self._buffer.nbytes

    def buckets(self, optimizer_buckets: Mapping[str, int]) -> dict[str, int]:
        """Return the optimizer bucket of each local tensor, with those after which FP8 values can be made."""
        made = {region.local: self._bucket_of(region, optimizer_buckets) for region in self._regions}
        scales = {region.local_scales: made[region.local] for region in self._regions}
        return {**optimizer_buckets, **made, **scales}

    @staticmethod
    def _bucket_of(region: Region, optimizer_buckets: Mapping[str, int]) -> int:
        return max(optimizer_buckets.get(piece.view.tensor, -1) for piece in region.pieces)

    def share(self, split: Mapping[str, SplitBlocks], rounded_scales: Collection[str] = ()) -> None:
        """Take note of what all ranks need.

        Args:
            split: the blocks that other ranks have parts of, too.
            rounded_scales: the kinds of tensors whose scales are to be powers of two.
        """
        self._split, self._rounded_scales = split, rounded_scales

    def allocate(self) -> None:
        """Begin a sync, for which all values are to be made."""
        self._buffer.allocate()
        self._pending = list(self._regions)

    def release(self) -> None:
        """End a sync."""
        if not self._keeps:
            self._buffer.release()

    @torch.no_grad()
    def find_largest(self, every: torch.Tensor) -> None:
        """Write the largest values of this rank's parts of split blocks into those of all tensors."""
        for region in self._regions:
            if region.name in self._split:
                largest = _largest(self._blocks(region))
                self._largest[region.local] = largest
                for own, shared in self._split[region.name].views(largest, region.grid, every):
                    shared.copy_(torch.maximum(shared, own.to(shared.device)))

    @torch.no_grad()
    def take_largest(self, every: torch.Tensor) -> None:
        """Read the largest values of split blocks, after those of all ranks have been brought together."""
        for region in self._regions:
            if region.name in self._split:
                for own, shared in self._split[region.name].views(self._largest[region.local], region.grid, every):
                    own.copy_(shared)

    @torch.no_grad()
    def quantize(self, optimizer_buckets: Mapping[str, int] | None = None, bucket: int = 0) -> None:
        """Make the values of all regions, or of those whose weights have been updated up to this optimizer bucket."""
        waiting = []
        for region in self._pending:
            if optimizer_buckets is not None and self._bucket_of(region, optimizer_buckets) > bucket:
                waiting.append(region)
                continue
            blocks = self._blocks(region)
            largest = self._largest.pop(region.local, None)
            largest = _largest(blocks) if largest is None else largest
            values, scales = quantize(blocks, largest, kind_of(region.name) in self._rounded_scales)
            inside = tuple(
                slice(a % BLOCK, a % BLOCK + n) for a, n in zip(region.box.start, region.box.size, strict=True)
            )
            self._replace(region.local, values.view(blocks.shape[0] * BLOCK, -1)[inside])
            self._replace(region.local_scales, scales)
        self._pending = waiting

    def _blocks(self, region: Region) -> torch.Tensor:
        """Return the blocks of a region [m, BLOCK, n, BLOCK], with zeros where it has only parts of them."""
        views = [strided_view(self._own[p.view.tensor], p.view, p.box.size).detach() for p in region.pieces]
        rows, columns = (n * BLOCK for n in region.grid.size)
        whole = views[0]
        if region.box.size != (rows, columns) or len(views) > 1:
            whole = views[0].new_zeros(rows, columns)
            row, column = (a % BLOCK for a in region.box.start)
            for view in views:
                whole[row : row + view.shape[0], column : column + view.shape[1]] = view
                row += view.shape[0]
        return whole.view(region.grid.size[0], BLOCK, region.grid.size[1], BLOCK)

    def _replace(self, name: str, new: torch.Tensor) -> None:
        """Write what a region's values or scales are now, and mark what differs from before."""
        made = self._made[name]
        if self._keeps:
            integers = torch.uint8 if made.dtype == torch.float8_e4m3fn else torch.int32
            differ = made.view(integers) != new.contiguous().view(integers)
            self._bits[name] |= pack_bits(differ.flatten())
        made.copy_(new)

    def changes(self) -> Changes:
        """Return the bitmaps of all values and scales, if they are kept."""
        return self._bits

    def clear_changes(self) -> None:
        for bits in self._bits.values():
            bits.zero_()


def _largest(blocks: torch.Tensor) -> torch.Tensor:
    return blocks.abs().amax((1, 3))


class QuantizedChanges:
    """The changed elements of a rank's FP8 values and scales, and of its other weights, which `own` tracks."""

    def __init__(self, weights: QuantizedWeights, own: ChangeSource):
        self._weights, self._own = weights, own

    @property
    def complete(self) -> bool:
        return self._own.complete

    @property
    def elements(self) -> int:
        return self._own.elements

    @property
    def nbytes(self) -> int:
        return self._own.nbytes + sum(bits.nbytes for bits in self._weights.changes().values())

    def changes(self, tensors: Mapping[str, torch.Tensor]) -> Changes:
        made = self._weights.changes()
        return {**self._own.changes({name: t for name, t in tensors.items() if name not in made}), **made}

    def check(self) -> bool:
        return self._own.check()

    def count_changed(self) -> int:
        return self._own.count_changed()

    def clear(self) -> None:
        self._own.clear()
        self._weights.clear_changes()
