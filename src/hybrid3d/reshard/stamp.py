"""One layer stands for all that are like it: an engine is asked about one of each kind, whose pieces are renamed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from hybrid3d.reshard.layout import Piece, View

# As canonical tensors and the parameters of both engines have it in their names.
_LAYER = re.compile(r"\blayers\.(\d+)\.")


def layer_of(name: str) -> int | None:
    """The number of the layer that a canonical or local tensor belongs to; None where it is in none."""
    match = _LAYER.search(name)
    return int(match[1]) if match else None


def replicate_layer(
    pieces: Iterable[Piece], old: int, new: int, local: tuple[str, str] | None = None
) -> Iterator[Piece]:
    """Pieces of layer `old` as those of layer `new`.

    Args:
        local: what stands in the local names for `layers.<old>.`, and what is put there; the same where not said.
    """
    canonical = f"layers.{old}.", f"layers.{new}."
    local = local or canonical
    for p in pieces:
        view = View(p.view.tensor.replace(*local, 1), p.view.offset, p.view.stride)
        yield Piece(p.name.replace(*canonical, 1), p.box, view, p.dtype)
