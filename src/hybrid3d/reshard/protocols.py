"""What the executor asks of both ends."""

from __future__ import annotations

from typing import Protocol

import torch

from hybrid3d.reshard.layout import Piece


class Source(Protocol):
    """Where a rank reads what it holds."""

    def read(self, piece: Piece) -> torch.Tensor:
        """The piece's elements, shaped as its box; a view of live memory where that is possible."""
        ...


class Sink(Protocol):
    """Where a rank writes what it wants, layer after layer.

    Two layers may be open at a time: what is received next may be on its way while the last one is finished.
    """

    def write(self, piece: Piece) -> torch.Tensor:
        """A view, shaped as the piece's box, which may be written while the piece's layer is open.

        It stays valid from run to run.
        """
        ...

    def open(self, layer: int | None) -> None:
        """All of this layer (or of what is in none) is about to be written."""
        ...

    def close(self, layer: int | None) -> None:
        """All of it has been written."""
        ...
