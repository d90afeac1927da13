"""Fingerprints of canonical tensors: sums over elements, so that those of boxes add up to that of the whole tensor.

The fingerprint of a box is the sum, modulo 2^64, of each element's bits as an integer times a weight: the product over
dims of a pseudo-random odd number that depends on the dim and on the index in the canonical tensor. A single changed
element always changes it, because an odd number times a difference of less than 2^64 is not 0. Several changes cancel
out with a probability of at most about 2^-32 (two flipped signs in float32).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch

from hybrid3d.reshard.ends import WeightSource
from hybrid3d.reshard.plan.box import Box
from hybrid3d.reshard.plan.layout import Piece

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
CHUNK = 2**20  # elements that are summed at a time: 8 MiB of products
MODULUS = 2**64

# Constants of SplitMix64 (Steele, Lea and Flood 2014, section 4), as signed integers
_GAMMA, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15 - MODULUS, 0xBF58476D1CE4E5B9 - MODULUS, 0x94D049BB133111EB - MODULUS


@dataclass(frozen=True)
class LocalFingerprints:
    """By canonical tensor, its boxes on this rank, each once, and a fingerprint of these, 0 to 2^64 - 1."""

    boxes: Mapping[str, frozenset[Box]]
    values: Mapping[str, int]


@torch.no_grad()
def fingerprint(values: torch.Tensor, box: Box) -> torch.Tensor:
    """Return the fingerprint of a box of a canonical tensor, an int64 scalar on the device of its elements.

    The elements are `values`, of any strides.
    """
    bits = values.detach().view(INTEGERS[values.itemsize])
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for part in box.split(CHUNK):
        sums = bits[tuple(slice(p - b, p - b + n) for p, b, n in zip(part.start, box.start, part.size, strict=True))]
        for dim in reversed(range(len(part.size))):
            sums = (sums * _weights(dim, part.start[dim], part.size[dim], str(values.device))).sum(-1)
        total += sums
    return total


def fingerprint_pieces(source: WeightSource) -> LocalFingerprints:
    """Return the fingerprints of a rank's pieces. A box that it holds twice, such as of a tied weight, counts once."""
    held: dict[tuple[str, Box], Piece] = {}
    for piece in source.holdings.pieces:
        held.setdefault((piece.name, piece.box), piece)
    found = [fingerprint(source.read(piece), piece.box) for piece in held.values()]
    numbers = torch.stack(found).tolist() if found else []
    boxes: dict[str, set[Box]] = {}
    values: dict[str, int] = {}
    for (name, box), number in zip(held, numbers, strict=True):
        boxes.setdefault(name, set()).add(box)
        values[name] = (values.get(name, 0) + number) % MODULUS
    return LocalFingerprints({name: frozenset(found) for name, found in boxes.items()}, values)


def whole_fingerprints(ranks: Iterable[LocalFingerprints]) -> dict[str, int]:
    """Return the fingerprint of each canonical tensor, from those of all ranks; of equal boxes the first rank's counts.

    Raises:
        ValueError: boxes of a tensor overlap without being the same boxes; the message has the tensor's name.
    """
    seen: dict[str, set[Box]] = {}
    whole: dict[str, int] = {}
    for rank in ranks:
        for name, boxes in rank.boxes.items():
            known = seen.setdefault(name, set())
            if boxes <= known:
                continue
            if any(box.overlaps(other) for box in boxes for other in known):
                raise ValueError(f"{name}: ranks hold boxes that overlap and are not the same")
            known |= boxes
            whole[name] = (whole.get(name, 0) + rank.values[name]) % MODULUS
    return whole


@lru_cache(256)
def _weights(dim: int, start: int, size: int, device: str) -> torch.Tensor:
    """Return the odd weights of indices from `start` on in a dim: SplitMix64's numbers of a seed for each dim."""
    index = torch.arange(start + 1, start + size + 1, dtype=torch.int64)
    mixed = (index + (dim << 48)) * _GAMMA
    mixed = (mixed ^ _shifted(mixed, 30)) * _MIX_1
    mixed = (mixed ^ _shifted(mixed, 27)) * _MIX_2
    return ((mixed ^ _shifted(mixed, 31)) | 1).to(device)


def _shifted(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Return unsigned 64-bit numbers, stored as int64, shifted to the right."""
    return (numbers >> bits) & ((1 << (64 - bits)) - 1)
