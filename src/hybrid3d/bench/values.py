"""Weights whose every element is known everywhere: a function of the tensor's name, the place in it and a number.

What must be where after a sync is computed there, from that function alone: no plan and no other rank is asked.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping

import torch

from hybrid3d.reshard.box import Box
from hybrid3d.reshard.layout import Holdings, Piece
from hybrid3d.reshard.protocols import Sink, Source
from hybrid3d.reshard.transport import as_bytes

CHUNK = 1 << 22  # elements made at a time
_STEPS = (-1640531527, 40503, 2135587861)  # by dim from the innermost; odd, so that neighbours differ


def values(
    name: str, box: Box, number: int, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[Box, torch.Tensor]]:
    """The elements of a box, a part at a time, as (part, tensor of its size): of [-1, 1) in steps of 2^-15, rounded."""
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
    """Give what a rank holds its values."""
    for piece in holdings.pieces:
        device = source.read(piece).device
        for part, content in values(piece.name, piece.box, number, getattr(torch, piece.dtype), device):
            source.read(piece.restrict(part)).copy_(content)


def wrong(pieces: Iterable[Piece], sink: Sink, number: int, travelled: Mapping[str, str]) -> list[str]:
    """Names of the pieces of which some bit is not as it must be.

    Args:
        travelled: by name, the dtype in which the tensor is held: it is rounded there, and then here.
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
