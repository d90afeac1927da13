"""Test weights that are a function of the tensor's name, the position in it and a number.

Each rank computes the values that it must have after a sync from this function alone, without a plan or other ranks.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping

import torch

from hybrid3d.reshard.box import Box
from hybrid3d.reshard.layout import Holdings, Piece
from hybrid3d.reshard.protocols import Sink, Source
from hybrid3d.reshard.transport import as_bytes

CHUNK = 1 << 22  # elements that are computed at a time
_STEPS = (-1640531527, 40503, 2135587861)  # by dim from the innermost; odd, so that neighbours differ


def values(
    name: str, box: Box, number: int, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[Box, torch.Tensor]]:
    """Yield the elements of a box in parts, as (part, tensor of its size): in [-1, 1) in steps of 2^-15, rounded."""
    seed = zlib.crc32(f"{name}/{number}".encode()) & 0x7FFFFFFF
    for part in box.split(CHUNK):
        mixed = torch.full((), seed, dtype=torch.int32, device=device)
        for dim, (start, size) in enumerate(zip(part.start, part.size, strict=True)):
            place = torch.arange(start, start + size, dtype=torch.int32, device=device)
            inner = len(part.size) - 1 - dim
            mixed = mixed + (place * _STEPS[inner]).view(-1, *[1] * inner)
        mixed = mixed ^ (mixed >> 15)
        yield part, ((mixed & 0xFFFF).float() / 2**15 - 1).to(dtype)


@torch.no_grad()
def fill(holdings: Holdings, source: Source, number: int) -> None:
    """Fill what a rank holds with the expected values."""
    for piece in holdings.pieces:
        device = source.read(piece).device
        for part, content in values(piece.name, piece.box, number, getattr(torch, piece.dtype), device):
            source.read(piece.restrict(part)).copy_(content)


def wrong(pieces: Iterable[Piece], sink: Sink, number: int, travelled: Mapping[str, str]) -> list[str]:
    """Return the names of pieces that differ in any bit from the expected values.

    Args:
        travelled: the dtype in which each tensor is held, by name: values are rounded to it first, then to the piece's.
    """
    found = []
    for piece in pieces:
        device, held = sink.write(piece).device, getattr(torch, travelled[piece.name])
        for part, content in values(piece.name, piece.box, number, held, device):
            there = sink.write(piece.restrict(part)).contiguous()
            if not as_bytes(there).equal(as_bytes(content.to(there.dtype))):
                found.append(piece.name)
                break
    return found
