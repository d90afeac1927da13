"""Packs booleans into bits and back, eight to a byte, the first in the lowest bit."""

from __future__ import annotations

import functools

import torch

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
