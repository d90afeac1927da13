"""Changes weights by noise that is the same on every rank that holds an element, and tells which elements changed."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hybrid3d.bench.values import SyntheticWeights
from hybrid3d.reshard.delta.changes import Changes, pack_bits
from hybrid3d.reshard.ends import NamedTensors
from hybrid3d.train.megatron.source import MegatronWeights

RELATIVE, ABSOLUTE = 0.05, 0.002  # the largest change of an element: a part of its value, and of those that are 0


class NoisyWeights:
    """A rank's weights in Megatron; what `ChangeTracker` is in a run (`reshard.ends.ChangeSource`).

    Only bfloat16 tensors are tracked, as in a run.
    """

    complete = True

    def __init__(self, weights: MegatronWeights):
        self._weights = weights
        self._bits = {
            name: pack_bits(torch.zeros(tensor.numel(), dtype=torch.bool, device=tensor.device))
            for name, tensor in self._tracked().items()
        }
        self._changed = 0

    @torch.no_grad()
    def change(self, number: int, fraction: float) -> None:
        """Change this fraction of the elements of every tensor; the noise depends on the number."""
        before = {name: tensor.detach().clone() for name, tensor in self._tracked().items()}
        source = NamedTensors(self._weights.tensors)
        noise, chosen = SyntheticWeights(number), SyntheticWeights(0, number, fraction)
        for piece in self._weights.holdings.pieces:
            tensor = source.read(piece)
            for part, values in noise.values(piece.name, piece.box, torch.float32, tensor.device):
                there = source.read(piece.restrict(part))
                values = there.float() * (1 + RELATIVE * values) + ABSOLUTE * values
                mask = chosen.changed(f"{piece.name}/{number}", part, tensor.device)
                there.copy_(torch.where(mask, values.to(there.dtype), there))
        for name, old in before.items():
            differs = (old.view(torch.int16) != self._weights.tensors[name].detach().view(torch.int16)).flatten()
            self._bits[name] |= pack_bits(differs)
            self._changed += int(differs.sum())

    def _tracked(self) -> Mapping[str, torch.Tensor]:
        return {name: t for name, t in self._weights.tensors.items() if t.dtype is torch.bfloat16}

    @property
    def elements(self) -> int:
        return sum(tensor.numel() for tensor in self._tracked().values())

    def bitmaps(self) -> Changes:
        return self._bits

    def check(self) -> bool:
        return True

    def count_changed(self) -> int:
        return self._changed

    def clear(self) -> None:
        self._changed = 0
        for bits in self._bits.values():
            bits.zero_()
