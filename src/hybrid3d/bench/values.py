"""Test weights that are a function of the tensor's name, the position in it and a number.

Each rank computes the values that it must have after a sync from this function alone, without a plan or other ranks.
Weights of which only a fraction has changed are the values of one number in most places and of another in the others.
This also tells which elements have changed, as many as asked for, without an optimizer.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from hybrid3d.reshard.delta.encoding import Changes, pack_bits
from hybrid3d.reshard.ends import Sink, Source
from hybrid3d.reshard.move.memory import strided_view
from hybrid3d.reshard.move.transport import as_bytes
from hybrid3d.reshard.plan.box import Box
from hybrid3d.reshard.plan.layout import Holdings, Piece

CHUNK = 1 << 22  # elements that are computed at a time
_STEPS = (-1640531527, 40503, 2135587861)  # by dim from the innermost; odd, so that neighbours differ
_CHANGE = -1  # the number whose values decide which elements change


@dataclass(frozen=True)
class SyntheticWeights:
    """The values of number `base`, except for a fraction of the elements, which have those of number `update`."""

    base: int
    update: int = 0
    fraction: float = 0.0  # of the elements of every tensor, in steps of 2^-16

    def values(
        self, name: str, box: Box, dtype: torch.dtype, device: torch.device
    ) -> Iterator[tuple[Box, torch.Tensor]]:
        """Yield the elements of a box in parts, as (part, tensor of its size)."""
        for part in box.split(CHUNK):
            found = _values(name, part, self.base, device)
            if self.fraction:
                found = torch.where(self.changed(name, part, device), _values(name, part, self.update, device), found)
            yield part, found.to(dtype)

    def changed(self, name: str, box: Box, device: torch.device) -> torch.Tensor:
        """Return, as booleans of the box's size, which elements have the values of `update`."""
        return _values(name, box, _CHANGE, device) < 2 * self.fraction - 1


def _values(name: str, box: Box, number: int, device: torch.device) -> torch.Tensor:
    """Return the elements of a box: in [-1, 1) in steps of 2^-15."""
    mixed = torch.full((), zlib.crc32(f"{name}/{number}".encode()) & 0x7FFFFFFF, dtype=torch.int32, device=device)
    for dim, (start, size) in enumerate(zip(box.start, box.size, strict=True)):
        place = torch.arange(start, start + size, dtype=torch.int32, device=device)
        inner = len(box.size) - 1 - dim
        mixed = mixed + (place * _STEPS[inner]).view(-1, *[1] * inner)
    mixed = mixed ^ (mixed >> 15)
    return (mixed & 0xFFFF).float() / 2**15 - 1


@torch.no_grad()
def fill(holdings: Holdings, source: Source, weights: SyntheticWeights) -> None:
    """Fill what a rank holds with the expected values."""
    for piece in holdings.pieces:
        device = source.read(piece).device
        for part, content in weights.values(piece.name, piece.box, getattr(torch, piece.dtype), device):
            source.read(piece.restrict(part)).copy_(content)


def wrong(pieces: Iterable[Piece], sink: Sink, weights: SyntheticWeights, travelled: Mapping[str, str]) -> list[str]:
    """Return the names of pieces that differ in any bit from the expected values.

    `travelled` has the dtype in which each tensor is held: values are rounded to it first, then to the piece's.
    """
    found = []
    for piece in pieces:
        device, held = sink.write(piece).device, getattr(torch, travelled[piece.name])
        for part, content in weights.values(piece.name, piece.box, held, device):
            there = sink.write(piece.restrict(part)).contiguous()
            if not as_bytes(there).equal(as_bytes(content.to(there.dtype))):
                found.append(piece.name)
                break
    return found


@dataclass(frozen=True)
class SyntheticChanges:
    """What `ChangeTracker` is in a run: one bit for each element of a rank's bfloat16 weights, set where it changed.

    They stay set, so that each sync of changed elements sends the same ones again.
    """

    bits: Changes
    elements: int
    changed: int
    complete: bool = True

    @classmethod
    def create(
        cls, weights: SyntheticWeights, holdings: Holdings, tensors: Mapping[str, torch.Tensor]
    ) -> SyntheticChanges:
        """Return the changes of weights that a rank holds in these local tensors."""
        pieces: dict[str, list[Piece]] = defaultdict(list)
        for piece in holdings.pieces:
            pieces[piece.view.tensor].append(piece)
        bits, elements, changed = {}, 0, 0
        for name, tensor in tensors.items():
            if tensor.dtype is not torch.bfloat16:
                continue
            assert tensor.is_contiguous(), f"{name}: bitmaps are in the order of memory"
            flags = torch.zeros(tensor.numel(), dtype=torch.bool, device=tensor.device)
            for piece in pieces[name]:
                for part in piece.box.split(CHUNK):
                    found = weights.changed(piece.name, part, tensor.device)
                    strided_view(flags, piece.restrict(part).view, part.size).copy_(found)
            bits[name], elements, changed = pack_bits(flags), elements + tensor.numel(), changed + int(flags.sum())
        return cls(bits, elements, changed)

    def bitmaps(self) -> Changes:
        return self.bits

    def check(self) -> bool:
        return True

    def count_changed(self) -> int:
        return self.changed

    def clear(self) -> None: ...
