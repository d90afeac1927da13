"""The protocols of the two ends between which the executor moves weights."""

from __future__ import annotations

from typing import Protocol

import torch

from hybrid3d.reshard.layout import Piece


class Source(Protocol):
    """Reads the pieces that a rank holds."""

    def read(self, piece: Piece) -> torch.Tensor:
        """Return the piece's elements, shaped as its box; a view of live memory where possible."""
        ...


class Sink(Protocol):
    """Takes the pieces that a rank wants, layer by layer.

    Two layers may be open at a time: the next one may be arriving while the last one is finalized.
    """

    def write(self, piece: Piece) -> torch.Tensor:
        """Return a view, shaped as the piece's box, that may be written while the piece's layer is open.

        What was written may also be read until the layer is closed. The view stays valid from run to run.
        """
        ...

    def open(self, layer: int | None) -> None:
        """Prepare a layer for writing; None stands for the tensors outside of all layers."""
        ...

    def close(self, layer: int | None) -> None:
        """Finalize a layer that has been written completely."""
        ...
