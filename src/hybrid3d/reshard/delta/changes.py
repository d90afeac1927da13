"""The changed elements of a rank's weights: one bit an element, and where a box has them.

Bits are packed eight to a byte, the first in the lowest bit.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from itertools import pairwise

import torch

from hybrid3d.reshard.plan.layout import Piece, Shape, contiguous_stride

# Multiplied by eight booleans as one little-endian integer, the i-th of them lands in bit 56 + i; no two terms meet.
_GATHER = sum(1 << (56 - 7 * i) for i in range(8))


def num_bytes(bits: int) -> int:
    """Return the bytes that hold so many bits."""
    return -(-bits // 8)


def pack_bits(bits: torch.Tensor) -> torch.Tensor:
    """Pack booleans [n] into bytes [ceil(n / 8)]; unused bits of the last byte are 0."""
    padded = torch.nn.functional.pad(bits, (0, -len(bits) % 8)).contiguous()
    if not len(padded):
        return padded.view(torch.uint8)  # an empty tensor has no strides to view as integers
    return ((padded.view(torch.int64) * _GATHER) >> 56).to(torch.uint8)


def unpack_bits(packed: torch.Tensor) -> torch.Tensor:
    """Unpack bytes [n] into booleans [8 n]."""
    return _table(packed.device)[packed.to(torch.int64)].view(torch.bool)


def set_bits(packed: torch.Tensor) -> torch.Tensor:
    """Return the positions of all set bits, ascending; reads only the bytes that have one more than once."""
    at = packed.nonzero().flatten()
    found = unpack_bits(packed[at]).nonzero().flatten()
    return at[found >> 3] * 8 + (found & 7)


def count_bits(packed: torch.Tensor) -> torch.Tensor:
    """Return how many bits of bytes [n] are set, as a tensor of one number."""
    if not len(packed):  # an empty tensor has no strides to view as integers
        return packed.sum()
    words = torch.nn.functional.pad(packed, (0, -len(packed) % 8)).view(torch.int64)
    words = words - ((words >> 1) & 0x5555555555555555)  # in each pair of bits, how many of them are set
    words = (words & 0x3333333333333333) + ((words >> 2) & 0x3333333333333333)
    words = (words + (words >> 4)) & 0x0F0F0F0F0F0F0F0F
    return ((words * 0x0101010101010101) >> 56).sum()


@functools.lru_cache(None)
def _table(device: torch.device) -> torch.Tensor:
    """Return for each byte its eight booleans as one little-endian integer."""
    spread = [sum(1 << (8 * i) for i in range(8) if byte >> i & 1) for byte in range(256)]
    return torch.tensor(spread, dtype=torch.int64, device=device)


Changes = Mapping[str, torch.Tensor]
"""By local tensor, a bitmap of its elements in the order of memory: bit i is set unless element i is known to have kept
its value since the last sync. All elements of a tensor that is missing count as changed."""


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


def memory_offsets(positions: torch.Tensor, size: Shape, strides: tuple[int, ...]) -> torch.Tensor:
    """Return where the elements at these positions of a box lie in memory, from the first element of the view."""
    offsets, rest = torch.zeros_like(positions), positions
    for stride, step in zip(strides, contiguous_stride(size), strict=True):
        index = rest.div(step, rounding_mode="floor")
        rest = rest - index * step
        offsets += index * stride
    return offsets


def flat_memory(view: torch.Tensor) -> torch.Tensor:
    """Return the memory that a strided view spans, as a flat tensor whose first element is that of the view."""
    extent = 1 + sum((n - 1) * s for n, s in zip(view.shape, view.stride(), strict=True))
    return view.as_strided((extent,), (1,), view.storage_offset())


def gather_elements(view: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return the elements of a strided view at these positions of its row-major order."""
    if view.is_contiguous():
        return view.view(-1)[positions]
    return flat_memory(view)[memory_offsets(positions, view.shape, view.stride())]


def scatter_elements(view: torch.Tensor, positions: torch.Tensor, values: torch.Tensor) -> None:
    """Write values at these positions of a strided view's row-major order."""
    if view.is_contiguous():
        view.view(-1)[positions] = values
    else:
        flat_memory(view)[memory_offsets(positions, view.shape, view.stride())] = values
