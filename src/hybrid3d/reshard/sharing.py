"""Finds tensors of the reader that can alias the memory that they would be copied from."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hybrid3d.reshard.plan.classes import layer_of
from hybrid3d.reshard.plan.layout import Demand, Piece
from hybrid3d.reshard.plan.planner import Transfer


@dataclass(frozen=True)
class StorageAlias:
    """The holder's memory that a tensor of the reader can alias.

    Attributes:
        source: the holder's local tensor.
        offset: elements from the first element of `source` to that of the reader's tensor.
    """

    source: str
    offset: int


def find_storage_aliases(
    transfers: Iterable[Transfer], demand: Demand, sizes: Mapping[str, int]
) -> dict[str, StorageAlias]:
    """Return the storage that each of a rank's wanted tensors can alias, by the tensor's local name.

    A tensor qualifies if all of its elements come from one tensor of the same rank, in the same dtype and strides. In
    each layer at least one tensor is still copied, so that the sink has a transfer after which it finalizes the layer.

    Args:
        transfers: all transfers to this rank.
        demand: what this rank wants.
        sizes: the number of elements of each local tensor whose storage may be replaced.
    """
    arriving: dict[str, list[Transfer]] = defaultdict(list)
    layers: dict[int | None, list[str]] = defaultdict(list)
    for t in transfers:
        assert t.target is not None, "a rank knows the memory of its own pieces"
        arriving[t.target.view.tensor].append(t)
    filled = {fill.view.tensor for fill in demand.fills}
    for tensor, tensor_transfers in arriving.items():
        layers[layer_of(tensor_transfers[0].name)].append(tensor)
    aliases = {}
    for tensor, tensor_transfers in arriving.items():
        candidates = {_alias(t) for t in tensor_transfers}
        complete = sum(t.box.numel for t in tensor_transfers) == sizes.get(tensor) and tensor not in filled
        if complete and len(candidates) == 1 and None not in candidates:
            aliases[tensor] = candidates.pop()
    for tensors in layers.values():
        if all(tensor in aliases for tensor in tensors):
            del aliases[min(tensors, key=lambda tensor: (sizes[tensor], tensor))]
    return {tensor: alias for tensor, alias in aliases.items() if alias is not None}


def _alias(t: Transfer) -> StorageAlias | None:
    if t.source is None or t.target is None or t.src != t.dst or t.source.dtype != t.target.dtype:
        return None
    if _strides(t.source) != _strides(t.target):
        return None
    return StorageAlias(t.source.view.tensor, t.source.view.offset - t.target.view.offset)


def _strides(piece: Piece) -> list[int]:
    """Return the strides of the dims with more than one element."""
    return [step for step, size in zip(piece.view.stride, piece.box.size, strict=True) if size > 1]
