"""Replicates the pieces of one layer for all layers of the same kind, so that engines are queried once per kind."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from hybrid3d.reshard.plan.layout import Piece, View

# Canonical tensors and the parameters of both engines name their layer in this form.
_LAYER = re.compile(r"\blayers\.(\d+)\.")


def layer_of(name: str) -> int | None:
    """Return the layer number in the name of a canonical or local tensor; None outside of all layers."""
    match = _LAYER.search(name)
    return int(match[1]) if match else None


def replicate_layer(
    pieces: Iterable[Piece], old: int, new: int, local: tuple[str, str] | None = None
) -> Iterator[Piece]:
    """Yield the pieces of layer `old` renamed to layer `new`.

    Args:
        local: the substring of local names to replace, and its replacement; by default the layer numbers as above.
    """
    canonical = f"layers.{old}.", f"layers.{new}."
    local = local or canonical
    for p in pieces:
        view = View(p.view.tensor.replace(*local, 1), p.view.offset, p.view.stride)
        yield Piece(p.name.replace(*canonical, 1), p.box, view, p.dtype)
