"""A source that sends what another one has, negated: all that a new kind of weights to send takes."""

from __future__ import annotations

import torch

from hybrid3d.reshard.ends import NOTHING_TRACKED, Exchange, WeightSource
from hybrid3d.reshard.plan.layout import Piece
from hybrid3d.reshard.sources import Wrapped


class Negated(Wrapped):
    """The negatives of a source's values, made in memory of their own once all of these are there."""

    changes = NOTHING_TRACKED

    def __init__(self, base: WeightSource):
        super().__init__(base)
        self._made = {piece: torch.empty_like(base.read(piece)) for piece in base.holdings.pieces}

    def read(self, piece: Piece) -> torch.Tensor:
        whole = next(held for held in self._made if held.name == piece.name and held.box.contains(piece.box))
        inside = zip(piece.box.start, whole.box.start, piece.box.size, strict=True)
        return self._made[whole][tuple(slice(a - first, a - first + n) for a, first, n in inside)]

    def advance(self, bucket: int) -> bool:
        return False

    def complete(self, exchange: Exchange) -> None:
        super().complete(exchange)
        for piece, made in self._made.items():
            torch.neg(self._base.read(piece), out=made)
