"""Sources over sources: sums with adapters, changes that are found by comparison, and some of a model's tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, ExitStack

import torch

from hybrid3d.reshard.delta.encoding import Changes, count_bits, num_bytes, pack_bits
from hybrid3d.reshard.ends import NOTHING_TRACKED, ChangeSource, Exchange, WeightSource
from hybrid3d.reshard.move.device import device
from hybrid3d.reshard.move.memory import strided_view
from hybrid3d.reshard.plan.classes import Group
from hybrid3d.reshard.plan.layout import Holdings, Piece


class Wrapped:
    """Passes every call to the source below it; a subclass overrides what differs."""

    def __init__(self, base: WeightSource):
        self._base = base
        self.holdings, self.ready_after = base.holdings, base.ready_after

    @property
    def changes(self) -> ChangeSource:
        return self._base.changes

    def read(self, piece: Piece) -> torch.Tensor:
        return self._base.read(piece)

    def agree(self, holders: Sequence[Group], rounded_scales: Collection[str]) -> None:
        self._base.agree(holders, rounded_scales)

    def begin(self) -> None:
        self._base.begin()

    def advance(self, bucket: int) -> bool:
        return self._base.advance(bucket)

    def complete(self, exchange: Exchange) -> None:
        self._base.complete(exchange)

    def end(self) -> None:
        self._base.end()

    def abandon(self) -> None:
        self._base.abandon()


class Only(Wrapped):
    """Those canonical tensors of a source whose names are wanted."""

    def __init__(self, base: WeightSource, wants: Callable[[str], bool]):
        super().__init__(base)
        self.holdings = Holdings(tuple(piece for piece in base.holdings.pieces if wants(piece.name)))


class Merged(Wrapped):
    """The sums of a source's weights and their adapters, held in its memory from `complete` to `end`, within `merged`.

    Nothing is known of their changes: the optimizer updates the adapters, and not the sums.
    """

    changes = NOTHING_TRACKED

    def __init__(self, base: WeightSource, merged: Callable[[], AbstractContextManager[None]]):
        super().__init__(base)
        self._merged, self._entered = merged, ExitStack()

    def advance(self, bucket: int) -> bool:
        return False

    def complete(self, exchange: Exchange) -> None:
        super().complete(exchange)
        self._entered.enter_context(self._merged())

    def end(self) -> None:
        self._entered.close()
        super().end()

    def abandon(self) -> None:
        self._entered.close()
        super().abandon()


class Compared(Wrapped):
    """A source whose changes are found by comparison with a copy of what was sent last.

    The copy takes as many bytes as the tensors of which updates may change a piece. Frozen tensors need none.
    """

    def __init__(self, base: WeightSource, may_change: Callable[[Piece], bool]):
        super().__init__(base)
        self._comparison = Comparison(base, may_change)

    @property
    def changes(self) -> ChangeSource:
        return self._comparison


class Comparison:
    """The elements of a source's pieces that differ from a copy, which `clear` makes (`reshard.ends.ChangeSource`).

    `bitmaps`, `count_changed` and `clear` are called while the source's values are those of a version.
    """

    def __init__(self, source: WeightSource, may_change: Callable[[Piece], bool]):
        self._source, self.complete = source, False
        pieces: dict[str, list[Piece]] = {}
        for piece in source.holdings.pieces:
            pieces.setdefault(piece.view.tensor, []).append(piece)
        self._sizes = {name: max(map(_span, of_tensor)) for name, of_tensor in pieces.items()}
        self._compared = {name: [p for p in of_tensor if may_change(p)] for name, of_tensor in pieces.items()}
        self.elements = sum(piece.box.numel for of_tensor in self._compared.values() for piece in of_tensor)
        self._sent: dict[Piece, torch.Tensor] = {}
        self._found: dict[str, torch.Tensor] = {}
        self._is_current = False

    def check(self) -> bool:
        return self.complete

    @torch.no_grad()
    def bitmaps(self) -> Changes:
        if not self._found:
            self._found = {
                name: torch.zeros(num_bytes(size), dtype=torch.uint8, device=device())
                for name, size in self._sizes.items()
            }
        if self.complete and not self._is_current:
            for name, pieces in self._compared.items():
                if pieces:
                    self._found[name].copy_(self._differing(name, pieces))
        self._is_current = True
        return self._found

    def _differing(self, name: str, pieces: Sequence[Piece]) -> torch.Tensor:
        differ = torch.zeros(self._sizes[name], dtype=torch.bool, device=device())
        for piece in pieces:
            now, before = _bits(self._source.read(piece)), _bits(self._sent[piece])
            strided_view(differ, piece.view, piece.box.size).copy_(now != before)
        return pack_bits(differ)

    def count_changed(self) -> int:
        return sum(int(count_bits(bits)) for name, bits in self.bitmaps().items() if self._compared[name])

    @torch.no_grad()
    def clear(self) -> None:
        for piece in (piece for pieces in self._compared.values() for piece in pieces):
            now = self._source.read(piece)
            if piece not in self._sent:
                self._sent[piece] = torch.empty(piece.box.size, dtype=now.dtype, device=now.device)
            self._sent[piece].copy_(now)
        self.complete, self._is_current = True, False


def _span(piece: Piece) -> int:
    """Return the number of elements of a local tensor up to the last one that is in the piece."""
    return 1 + piece.view.offset + sum((n - 1) * s for n, s in zip(piece.box.size, piece.view.stride, strict=True))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor of two or four bytes as integers, so that -0 and 0 differ and NaN equals NaN."""
    return tensor.detach().view(torch.int16 if tensor.itemsize == 2 else torch.int32)
