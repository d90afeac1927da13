"""The pieces of canonical tensors that a rank has in plain tensors and in the local shards of DTensors.

Which rows a shard has is asked from torch: it shards the numbers of the rows as it has sharded the tensor.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from hybrid3d.reshard.ends import PlainSink, PlainSource
from hybrid3d.reshard.plan.box import Box
from hybrid3d.reshard.plan.layout import ITEMSIZE, Demand, Holdings, Piece, View

Run = tuple[int, int, int]
"""Consecutive rows: the first one in the local tensor, the first one in the canonical tensor, and how many."""


def local_shards(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what this rank has of each tensor, by name: a plain tensor itself, and of a DTensor the local shard."""
    return {
        name: (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
        for name, tensor in tensors.items()
        if not isinstance(tensor, DTensor) or tensor.device_mesh.get_coordinate() is not None
    }


def pieces_of(tensors: Mapping[str, torch.Tensor]) -> tuple[Piece, ...]:
    """Return the pieces of canonical tensors that lie in the tensors of `local_shards`.

    Args:
        tensors: by canonical name, plain tensors, which this rank has whole, and DTensors, of which it has a shard.

    Raises:
        ValueError: a DTensor has sums that are not added up yet, or a tensor has a dtype that cannot be sent.
    """
    pieces = []
    for name, memory in local_shards(tensors).items():
        dtype = str(memory.dtype).removeprefix("torch.")
        if dtype not in ITEMSIZE:
            raise ValueError(f"{name} has dtype {dtype}: only {', '.join(ITEMSIZE)} can be resharded")
        for runs in itertools.product(*_runs_of(name, tensors[name])):
            box = Box(tuple(start for _, start, _ in runs), tuple(length for _, _, length in runs))
            offset = sum(first * stride for (first, _, _), stride in zip(runs, memory.stride(), strict=True))
            if box.numel:
                pieces.append(Piece(name, box, View(name, offset, memory.stride()), dtype))
    return tuple(pieces)


def _runs_of(name: str, tensor: torch.Tensor) -> list[list[Run]]:
    """Return the rows of a tensor that this rank has, along each dim.

    Raises:
        ValueError: they have sums that are not added up yet.
    """
    if not isinstance(tensor, DTensor):
        return [[(0, 0, length)] for length in tensor.shape]
    mesh, placements = tensor.device_mesh, tensor.placements
    if any(placement.is_partial() for placement in placements):
        raise ValueError(f"{name} is placed as {placements}: redistribute it, as its shards are not added up yet")
    place = tuple(mesh.get_coordinate() or ())
    return [
        _runs(dim, length, mesh, place, tuple(p if getattr(p, "dim", None) == dim else Replicate() for p in placements))
        for dim, length in enumerate(tensor.shape)
    ]


@functools.lru_cache(1 << 12)
def _runs(
    dim: int, length: int, mesh: DeviceMesh, place: tuple[int, ...], placements: tuple[Placement, ...]
) -> list[Run]:
    """Return which of so many rows along a dim this rank has, at its place of the mesh; no other dim is sharded."""
    numbers = torch.arange(length).view([length if d == dim else 1 for d in range(dim + 1)])
    rows = distribute_tensor(numbers, mesh, placements, src_data_rank=None).to_local().flatten().tolist()
    runs: list[Run] = []
    for position, row in enumerate(rows):
        if runs and row == runs[-1][1] + runs[-1][2]:
            runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
        else:
            runs.append((position, row, 1))
    return runs


def tensor_source(tensors: Mapping[str, torch.Tensor]) -> PlainSource:
    """Return the source of tensors that this rank holds; arguments and errors: as for `pieces_of`."""
    return PlainSource(local_shards(tensors), Holdings(pieces_of(tensors)))


def tensor_sink(tensors: Mapping[str, torch.Tensor]) -> PlainSink:
    """Return the sink of tensors that this rank wants; arguments and errors: as for `pieces_of`."""
    return PlainSink(local_shards(tensors), Demand(pieces_of(tensors)))
