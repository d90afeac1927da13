"""The protocols of the two ends between which the executor moves weights, and of the source of their changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from hybrid3d.reshard.delta.changes import Changes
from hybrid3d.reshard.plan.layout import Piece


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


class ChangeSource(Protocol):
    """Tells which elements of a rank's weights have changed since `clear`; those that it does not track may have.

    Attributes:
        complete: False if tracked weights were changed by something that it does not see.
        elements: the number of tracked elements.
        nbytes: the memory that it takes.
    """

    @property
    def complete(self) -> bool: ...

    @property
    def elements(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    def changes(self, tensors: Mapping[str, torch.Tensor]) -> Changes:
        """Return the bitmaps of those of a rank's local tensors that are tracked."""
        ...

    def check(self) -> bool:
        """Return `complete`, after a look at whether the weights still are what the last update made of them."""
        ...

    def count_changed(self) -> int:
        """Return how many elements have changed."""
        ...

    def clear(self) -> None:
        """Begin anew: the weights as they are now have been synced."""
        ...
