"""FP8 with block scales: the arithmetic, and which pieces a rank that holds other weights has of it.

A canonical tensor in FP8 (e4m3) has a second one beside it, its scales in float32: one for each block of 128 x 128
elements, by which the block's FP8 values are multiplied. The last blocks of a dim may be smaller. Kernels that take the
exponents of scales only (UE8M0) need scales that are powers of two.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from hybrid3d.reshard.plan.box import Box
from hybrid3d.reshard.plan.classes import Signature
from hybrid3d.reshard.plan.layout import Holdings, Piece, Shape, View, contiguous_stride

BLOCK = 128
FP8, SCALE = "float8_e4m3fn", "float32"  # the dtypes of both tensors
SCALE_SUFFIX = "_scale_inv"  # as in DeepSeek-V3's checkpoints
LARGEST = 448.0  # of e4m3
SMALLEST_AMAX = 1e-4  # of a block, so that one of zeros has a scale: vLLM's `per_block_cast_to_fp8`

IsQuantized = Callable[[str], bool]
"""Returns whether a canonical tensor is quantized."""


def quantize(
    blocks: torch.Tensor, amax: torch.Tensor, powers_of_two: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the FP8 values of blocks [m, BLOCK, n, BLOCK] and their scales [m, n], from their largest values [m, n].

    The operations and their rounding are those of vLLM's `per_block_cast_to_fp8`.

    Args:
        powers_of_two: round scales up to powers of two (`use_ue8m0` there). The largest value of a block may then round
            down to half of the largest of e4m3: such a block has half of the scale that vLLM's function gives it, and
            twice the values. vLLM applies its function to weights in FP8 again, and then changes no bit of these.
    """
    scales = _scales_of(amax, powers_of_two)
    values = (blocks * (1.0 / scales)[:, None, :, None]).to(torch.float8_e4m3fn)
    if not powers_of_two:
        return values, scales
    again = _scales_of((amax * (1.0 / scales)).to(torch.float8_e4m3fn).float() * scales, powers_of_two)
    factors = (scales / again).bfloat16()[:, None, :, None]
    return (values.bfloat16() * factors).to(torch.float8_e4m3fn), again


def _scales_of(amax: torch.Tensor, powers_of_two: bool) -> torch.Tensor:
    scales = amax.float().clamp(SMALLEST_AMAX) / LARGEST
    return torch.pow(2.0, torch.ceil(torch.log2(scales))) if powers_of_two else scales


def kind_of(name: str) -> str:
    """Return the name of a canonical tensor without the numbers of its layer and expert."""
    return re.sub(r"\.\d+(?=\.)", ".*", name)


def dequantize(quantized: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return what FP8 values [m, n] and the scales of their blocks stand for."""
    rows, columns = quantized.shape
    spread = scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return (quantized.float() * spread).to(dtype)


def quantized_shapes(shapes: Mapping[str, Shape], is_quantized: IsQuantized) -> dict[str, Shape]:
    """Return the canonical tensors of these shapes with the scales of those that are quantized."""
    quantized = filter(is_quantized, shapes)
    return {**shapes, **{f"{name}{SCALE_SUFFIX}": tuple(-(-n // BLOCK) for n in shapes[name]) for name in quantized}}


@dataclass(frozen=True)
class Region:
    """A rectangle of a canonical tensor that a rank holds, and that it quantizes at once.

    Attributes:
        pieces: the pieces of the box, before quantization.
        local: the local name of its FP8 values; that of the scales of all blocks that it has a part of is longer.
    """

    name: str
    box: Box
    pieces: tuple[Piece, ...]
    local: str

    @property
    def grid(self) -> Box:
        """The blocks that the region has a part of."""
        first = tuple(a // BLOCK for a in self.box.start)
        return Box(first, tuple(-(-b // BLOCK) - a for a, b in zip(first, self.box.stop, strict=True)))

    @property
    def local_scales(self) -> str:
        return f"{self.local}{SCALE_SUFFIX}"

    def quantized_pieces(self) -> list[Piece]:
        """Return the FP8 piece, and that of the scales of the blocks whose first element it has.

        A block that several ranks have parts of has its scale on one of them, so that no two hold overlapping boxes.
        """
        values = Piece(self.name, self.box, View(self.local, 0, contiguous_stride(self.box.size)), FP8)
        first = tuple(-(-a // BLOCK) for a in self.box.start)
        size = tuple(-(-b // BLOCK) - a for a, b in zip(first, self.box.stop, strict=True))
        if min(size) < 1:
            return [values]
        all_scales = View(self.local_scales, 0, contiguous_stride(self.grid.size))
        whole = Piece(f"{self.name}{SCALE_SUFFIX}", self.grid, all_scales, SCALE)
        return [values, whole.restrict(Box(first, size))]


def regions_of(pieces: Iterable[Piece], is_quantized: IsQuantized) -> list[Region]:
    """Return the regions of all quantized tensors, each as large as the pieces allow."""
    by_name: dict[str, dict[Box, Piece]] = {}
    for piece in pieces:
        if is_quantized(piece.name):
            by_name.setdefault(piece.name, {})[piece.box] = piece  # equal boxes are replicas
    return [region for name, boxes in by_name.items() for region in _merge(name, list(boxes.values()))]


def _merge(name: str, pieces: Sequence[Piece]) -> list[Region]:
    """Return the regions of one tensor: pieces of the same columns are merged where one follows on the other."""
    runs: list[list[Piece]] = []
    for piece in sorted(pieces, key=lambda p: (p.box.start[1:], p.box.size[1:], p.box.start[0])):
        box, last = piece.box, runs[-1][-1].box if runs else None
        if last and (last.stop[0], last.start[1:], last.size[1:]) == (box.start[0], box.start[1:], box.size[1:]):
            runs[-1].append(piece)
        else:
            runs.append([piece])
    regions = []
    for number, run in enumerate(runs):
        box = Box(run[0].box.start, (sum(piece.box.size[0] for piece in run), *run[0].box.size[1:]))
        regions.append(Region(name, box, tuple(run), f"{name}#{number}" if number else name))
    return regions


def quantized_holdings(holdings: Holdings, is_quantized: IsQuantized) -> Holdings:
    """Return what a rank has to send of its holdings once it has quantized them."""
    kept = [piece for piece in holdings.pieces if not is_quantized(piece.name)]
    quantized = [piece for region in regions_of(holdings.pieces, is_quantized) for piece in region.quantized_pieces()]
    return Holdings((*kept, *quantized))


@dataclass(frozen=True)
class SplitBlocks:
    """The blocks of one tensor that several ranks hold parts of.

    Attributes:
        first: the number of the tensor's first such block among those of all tensors.
        rows, columns: those of the tensor's grid of blocks that are split.
    """

    first: int
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    grid: Shape

    @property
    def count(self) -> int:
        return len(self.rows) * self.grid[1] + len(self.columns) * self.grid[0]

    def views(self, amax: torch.Tensor, grid: Box, every: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return pairs of views of the same blocks: of a region's largest values, and of those of all tensors.

        Args:
            amax: of the blocks of the region's grid.
            every: the largest values of all split blocks.
        """
        own, pairs = every[self.first : self.first + self.count], []
        by_row = own[: len(self.rows) * self.grid[1]].view(-1, self.grid[1])
        by_column = own[len(self.rows) * self.grid[1] :].view(-1, self.grid[0])
        for number, row in enumerate(self.rows):
            if grid.start[0] <= row < grid.stop[0]:
                pairs.append((amax[row - grid.start[0]], by_row[number, grid.start[1] : grid.stop[1]]))
        for number, column in enumerate(self.columns):
            if grid.start[1] <= column < grid.stop[1]:
                pairs.append((amax[:, column - grid.start[1]], by_column[number, grid.start[0] : grid.stop[0]]))
        return pairs


def split_blocks(holders: Iterable[Signature]) -> dict[str, SplitBlocks]:
    """Return the tensors with blocks that several ranks hold parts of, once quantized; every rank finds the same."""
    edges: dict[str, tuple[set[int], set[int]]] = {}
    for signature in holders:
        for boxes, names in signature.items():
            if boxes[0][1] != FP8:
                continue
            found = [{edge for box, _ in boxes for edge in (box.start[dim], box.stop[dim])} for dim in (0, 1)]
            for name in names:
                for of_dim, new in zip(edges.setdefault(name, (set(), set())), found, strict=True):
                    of_dim.update(new)
    split, first = {}, 0
    for name in sorted(edges):
        stops = [max(of_dim) for of_dim in edges[name]]
        inside = [
            tuple(sorted({edge // BLOCK for edge in of_dim if edge % BLOCK and edge < stop}))
            for of_dim, stop in zip(edges[name], stops, strict=True)
        ]
        if any(inside):
            grid = tuple(-(-n // BLOCK) for n in stops)
            split[name] = SplitBlocks(first, inside[0], inside[1], grid)
            first += split[name].count
    return split
