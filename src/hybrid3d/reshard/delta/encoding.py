"""Encodes which elements of a run changed, and their new values, in little more bytes than the entropy of both.

A run of n elements of which k changed is sent as its k values and their positions, in whichever of three forms is
smallest. Both ends derive the form and its size from n and k alone:

- Elias-Fano: the low bits of each position as they are, the high bits in unary (Elias 1974, Fano 1971), which is within
  0.6 bits a position of the entropy if the positions are random;
- a bitmap: one bit for each element of the run;
- dense: all n values and no positions.

Values are new values, not differences: applying an encoding twice gives the same as applying it once. Bits are packed
eight to a byte, the first in the lowest bit.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

Changes = Mapping[str, torch.Tensor]
"""By local tensor, a bitmap of its elements in the order of memory: bit i is set unless element i is known to have kept
its value since the last sync. All elements of a tensor that is missing count as changed."""

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


@dataclass(frozen=True)
class Form:
    """The form in which a run is sent: the bytes of values and positions, and the low bits of each position, of which
    only the Elias-Fano form has some.
    """

    kind: Literal["dense", "bitmap", "elias-fano"]
    nbytes: int
    low_bits: int = 0


def form_of(n: int, k: int, itemsize: int) -> Form:
    """Return the smallest form of a run of `n` elements, of which `k` changed, of `itemsize` bytes each."""
    if not 0 <= k <= n:
        raise ValueError(f"{k} elements of a run of {n} cannot have changed")
    if k == 0:
        return Form("bitmap", 0)
    about = max(0, (n // k).bit_length() - 1)
    candidates = [
        Form("dense", n * itemsize),
        Form("bitmap", k * itemsize + num_bytes(n)),
        *(
            Form("elias-fano", k * itemsize + num_bytes(_high_bits(n, k, low) + k * low), low)
            for low in (about, about + 1)
        ),
    ]
    return min(candidates, key=lambda form: form.nbytes)


def _high_bits(n: int, k: int, low: int) -> int:
    """Return the length of the unary part: a one for each position, a zero for each step of the high part."""
    return k + ((n - 1) >> low)


def encode(positions: torch.Tensor, values: torch.Tensor, n: int, out: torch.Tensor) -> None:
    """Write a run of `n` elements in its smallest form, which must not be dense.

    Args:
        positions: [k] int64, ascending, of the elements that changed.
        values: [k] their new values.
        out: [nbytes] uint8, as large as the form says.
    """
    form = form_of(n, len(positions), values.itemsize)
    assert form.kind != "dense", "a dense run is copied"
    if not len(positions):
        return
    at = values.nbytes
    out[:at] = values.view(torch.uint8)
    if form.kind == "bitmap":
        bits = torch.zeros(n, dtype=torch.bool, device=positions.device)
        bits[positions] = True
    else:
        low, high = form.low_bits, _high_bits(n, len(positions), form.low_bits)
        bits = torch.zeros(high + len(positions) * low, dtype=torch.bool, device=positions.device)
        bits[(positions >> low) + torch.arange(len(positions), device=positions.device)] = True
        if low:
            bits[high:] = ((positions[:, None] >> torch.arange(low, device=positions.device)) & 1 != 0).flatten()
    out[at:] = pack_bits(bits)


def decode(data: torch.Tensor, n: int, k: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the positions [k] and values [k] of a run that `encode` wrote to `data`, which is aligned for `dtype`."""
    form = form_of(n, k, dtype.itemsize)
    values, packed = data[: k * dtype.itemsize].view(dtype), data[k * dtype.itemsize :]
    if form.kind == "bitmap":
        return set_bits(packed), values
    low, high = form.low_bits, _high_bits(n, k, form.low_bits)
    bits = unpack_bits(packed)
    positions = (bits[:high].nonzero().flatten() - torch.arange(k, device=data.device)) << low
    if low:
        weights = torch.tensor([1 << bit for bit in range(low)], device=data.device)
        positions += (bits[high : high + k * low].view(k, low) * weights).sum(1)
    return positions, values


def entropy_bytes(n: int, k: int, itemsize: int) -> float:
    """Return the fewest bytes, on average, that tell which `k` of `n` elements changed, and their values.

    All choices of positions and all values count as equally likely: log2 of n over k, plus the bits of the values.
    """
    choices = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
    return choices / math.log(2) / 8 + k * itemsize
