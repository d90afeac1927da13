"""A source of FP8 values and scales, made anew from the weights of the source below it in each version.

Every rank makes it, also one that holds nothing, because the largest values of some blocks are agreed on by all.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import torch

from hybrid3d.reshard import fp8
from hybrid3d.reshard.delta.encoding import Changes, num_bytes, pack_bits
from hybrid3d.reshard.ends import ChangeSource, Exchange, WeightSource
from hybrid3d.reshard.move.memory import DeviceBuffer, align_up, strided_view
from hybrid3d.reshard.plan.classes import Group
from hybrid3d.reshard.plan.layout import Piece


class Quantized:
    """The FP8 values and scales of a source's quantized tensors, beside its other weights.

    With `keep` their memory is kept from version to version, so that it is known which values changed.

    Attributes:
        ready_after: FP8 values can be made after the last optimizer bucket of their weights.
        changes: of FP8 values and scales by comparison with the last version, where these are kept; of other weights as
            the source below says.
        made: the FP8 values and scales, by local name; there is memory for them from `begin` to `end`.
    """

    def __init__(self, base: WeightSource, is_quantized: fp8.IsQuantized, device: torch.device | str, keep: bool):
        self.holdings = fp8.quantized_holdings(base.holdings, is_quantized)
        self._base, self._keeps = base, keep
        self._regions = fp8.regions_of(base.holdings.pieces, is_quantized)
        sizes = [size for region in self._regions for size in (region.box.numel, 4 * region.grid.numel)]
        self._buffer = DeviceBuffer(sum(map(align_up, sizes)), device)
        self.made: dict[str, torch.Tensor] = {}
        self.ready_after = {**base.ready_after}
        at = 0
        for region in self._regions:
            bucket = max(base.ready_after.get(piece.view.tensor, -1) for piece in region.pieces)
            for name, box, dtype in (
                (region.local, region.box, torch.float8_e4m3fn),
                (region.local_scales, region.grid, torch.float32),
            ):
                nbytes = box.numel * dtype.itemsize
                self.made[name] = self._buffer.flat_view(at, nbytes, dtype).view(box.size)
                self.ready_after[name] = bucket
                at += align_up(nbytes)
        self._bits = {
            name: torch.zeros(num_bytes(made.numel()), dtype=torch.uint8, device=device)
            for name, made in self.made.items()
            if keep
        }
        self.changes: ChangeSource = QuantizedChanges(self._bits, base.changes)
        self._split: Mapping[str, fp8.SplitBlocks] = {}
        self._rounded_scales: Collection[str] = ()
        self._largest: dict[str, torch.Tensor] = {}  # of the blocks of regions with split blocks
        self._pending: list[fp8.Region] = []
        if not keep:
            self._buffer.release()

    def read(self, piece: Piece) -> torch.Tensor:
        made = self.made.get(piece.view.tensor)
        return self._base.read(piece) if made is None else strided_view(made, piece.view, piece.box.size)

    def agree(self, holders: Sequence[Group], rounded_scales: Collection[str]) -> None:
        """Find the blocks that several ranks have parts of, and take note of the scales that are rounded.

        What one engine needs, all get: any kernel computes with scales that are powers of two.
        """
        self._base.agree(holders, rounded_scales)
        self._split = fp8.split_blocks(signature for _, signature in holders)
        self._rounded_scales = rounded_scales

    def begin(self) -> None:
        self._base.begin()
        self._buffer.allocate()
        self._pending = list(self._regions)

    def advance(self, bucket: int) -> bool:
        """Quantize the weights that optimizer buckets up to this one update.

        Where ranks have parts of the same blocks, that waits for the last update of all ranks.
        """
        if not self._base.advance(bucket) or self._split:
            return False
        self._quantize(bucket)
        return True

    def complete(self, exchange: Exchange) -> None:
        self._base.complete(exchange)
        if self._split:
            every = torch.zeros(sum(split.count for split in self._split.values()))
            self._find_largest(every)
            exchange.maximum_of(every)
            self._take_largest(every)
        self._quantize()

    def end(self) -> None:
        if not self._keeps:
            self._buffer.release()
        self._base.end()

    def abandon(self) -> None:
        self._pending, self._largest = [], {}
        if not self._keeps:
            self._buffer.release()
        self._base.abandon()

    @torch.no_grad()
    def _find_largest(self, every: torch.Tensor) -> None:
        """Write the largest values of this rank's parts of split blocks into those of all tensors."""
        for region in self._regions:
            if region.name in self._split:
                largest = _largest(self._blocks(region))
                self._largest[region.local] = largest
                for own, shared in self._split[region.name].views(largest, region.grid, every):
                    shared.copy_(torch.maximum(shared, own.to(shared.device)))

    @torch.no_grad()
    def _take_largest(self, every: torch.Tensor) -> None:
        """Read the largest values of split blocks, after those of all ranks have been brought together."""
        for region in self._regions:
            if region.name in self._split:
                for own, shared in self._split[region.name].views(self._largest[region.local], region.grid, every):
                    own.copy_(shared)

    @torch.no_grad()
    def _quantize(self, bucket: float = math.inf) -> None:
        """Make the values of all regions, or of those whose weights have been updated up to this optimizer bucket."""
        updated = [region for region in self._pending if self.ready_after[region.local] <= bucket]
        self._pending = [region for region in self._pending if self.ready_after[region.local] > bucket]
        for region in updated:
            blocks = self._blocks(region)
            largest = self._largest.pop(region.local, None)
            largest = _largest(blocks) if largest is None else largest
            values, scales = fp8.quantize(blocks, largest, fp8.kind_of(region.name) in self._rounded_scales)
            inside = tuple(
                slice(a % fp8.BLOCK, a % fp8.BLOCK + n) for a, n in zip(region.box.start, region.box.size, strict=True)
            )
            self._replace(region.local, values.view(blocks.shape[0] * fp8.BLOCK, -1)[inside])
            self._replace(region.local_scales, scales)

    def _blocks(self, region: fp8.Region) -> torch.Tensor:
        """Return the blocks of a region [m, fp8.BLOCK, n, fp8.BLOCK], with zeros where it has only parts of them."""
        views = [self._base.read(piece).detach() for piece in region.pieces]
        rows, columns = (n * fp8.BLOCK for n in region.grid.size)
        whole = views[0]
        if region.box.size != (rows, columns) or len(views) > 1:
            whole = views[0].new_zeros(rows, columns)
            row, column = (a % fp8.BLOCK for a in region.box.start)
            for view in views:
                whole[row : row + view.shape[0], column : column + view.shape[1]] = view
                row += view.shape[0]
        return whole.view(region.grid.size[0], fp8.BLOCK, region.grid.size[1], fp8.BLOCK)

    def _replace(self, name: str, new: torch.Tensor) -> None:
        """Write what a region's values or scales are now, and mark what differs from before."""
        made = self.made[name]
        if self._keeps:
            integers = torch.uint8 if made.dtype == torch.float8_e4m3fn else torch.int32
            differ = made.view(integers) != new.contiguous().view(integers)
            self._bits[name] |= pack_bits(differ.flatten())
        made.copy_(new)


def _largest(blocks: torch.Tensor) -> torch.Tensor:
    return blocks.abs().amax((1, 3))


class QuantizedChanges:
    """The changed elements of a rank's FP8 values and scales, and of its other weights, which `own` tracks."""

    def __init__(self, made: Mapping[str, torch.Tensor], own: ChangeSource):
        self.made, self._own = made, own  # `made` are bitmaps

    @property
    def complete(self) -> bool:
        return self._own.complete

    @property
    def elements(self) -> int:
        return self._own.elements

    def bitmaps(self) -> Changes:
        return {**self._own.bitmaps(), **self.made}

    def check(self) -> bool:
        return self._own.check()

    def count_changed(self) -> int:
        return self._own.count_changed()

    def clear(self) -> None:
        self._own.clear()
        for bits in self.made.values():
            bits.zero_()
