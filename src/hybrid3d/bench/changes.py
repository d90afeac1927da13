"""The changed elements of a benchmark's weights: as many as asked for, known without an optimizer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hybrid3d.bench.values import CHUNK, SyntheticWeights
from hybrid3d.reshard.delta.bitmap import pack_bits
from hybrid3d.reshard.delta.changes import Changes
from hybrid3d.reshard.move.memory import strided_view
from hybrid3d.reshard.plan.layout import Holdings, Piece


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

    @property
    def nbytes(self) -> int:
        return sum(bits.nbytes for bits in self.bits.values())

    def changes(self, tensors: Mapping[str, torch.Tensor]) -> Changes:
        return {name: bits for name, bits in self.bits.items() if name in tensors}

    def check(self) -> bool:
        return True

    def count_changed(self) -> int:
        return self.changed

    def clear(self) -> None: ...
