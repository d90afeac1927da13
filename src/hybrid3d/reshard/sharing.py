"""Which of a reader's tensors could lie in the memory that they are copied from, with no copy at all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hybrid3d.reshard.layout import Demand, Piece
from hybrid3d.reshard.planner import Transfer
from hybrid3d.reshard.stamp import layer_of


@dataclass(frozen=True)
class StorageAlias:
    """A reader's tensor in a holder's memory.

    Attributes:
        source: the holder's local tensor.
        offset: elements from its first to that of the reader's tensor.
    """

    source: str
    offset: int


def find_storage_aliases(
    transfers: Iterable[Transfer], demand: Demand, sizes: Mapping[str, int]
) -> dict[str, StorageAlias]:
    """By local tensor of a rank as a reader: those that lie in one of its own tensors exactly as they are wanted.

    What arrives in them comes from this rank, in the same dtype and strides, and leaves no element out. In each layer
    one tensor is left to be copied, so that the reader has something to finalize the layer after.

    Args:
        transfers: all that arrive at this rank.
        demand: of this rank.
        sizes: elements of those of its local tensors that may be laid somewhere else.
    """
    arriving: dict[str, list[Transfer]] = defaultdict(list)
    layers: dict[int | None, list[str]] = defaultdict(list)
    for t in transfers:
        assert t.target is not None, "every rank knows where its own pieces lie"
        arriving[t.target.view.tensor].append(t)
    filled = {fill.view.tensor for fill in demand.fills}
    for tensor, those in arriving.items():
        layers[layer_of(those[0].name)].append(tensor)
    found = {}
    for tensor, those in arriving.items():
        one = {_sharing(t) for t in those}
        whole = sum(t.box.numel for t in those) == sizes.get(tensor) and tensor not in filled
        if whole and len(one) == 1 and None not in one:
            found[tensor] = one.pop()
    for tensors in layers.values():
        if all(tensor in found for tensor in tensors):
            del found[min(tensors, key=lambda tensor: (sizes[tensor], tensor))]
    return {tensor: sharing for tensor, sharing in found.items() if sharing is not None}


def _sharing(t: Transfer) -> StorageAlias | None:
    if t.source is None or t.target is None or t.src != t.dst or t.source.dtype != t.target.dtype:
        return None
    if _steps(t.source) != _steps(t.target):
        return None
    return StorageAlias(t.source.view.tensor, t.source.view.offset - t.target.view.offset)


def _steps(piece: Piece) -> list[int]:
    """Strides of the dims along which there is more than one element."""
    return [step for step, size in zip(piece.view.stride, piece.box.size, strict=True) if size > 1]
