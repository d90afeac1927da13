"""What a trainer's rank holds, according to vLLM's `WeightSource` in either of its forms.

vLLM 0.33 has sources declare which ranks own a parameter and how it is laid out across them (`ParamMeta`). With 0.32
the same is read where a source says it: from the classes here, which are vLLM's own where it has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer import base

from hybrid3d.reshard import Box, Holdings, Piece, View, local_shards, pieces_of
from hybrid3d.reshard.plan.layout import contiguous_stride

ReadTensors = Callable[[], Mapping[str, torch.Tensor]]
"""Returns a rank's local tensors as they are now, by name."""


@dataclass(frozen=True)
class _Replicate:
    """Every rank along this axis of a mesh has the whole extent."""


@dataclass(frozen=True)
class _Shard:
    """This axis of a mesh splits a dim as `torch.chunk` does."""

    dim: int


@dataclass(frozen=True)
class _ParamMeta(base.ParamMeta):
    """A parameter, and which ranks have it how: vLLM 0.33 has the same fields.

    Attributes:
        owners: the trainer's ranks that have a piece, in the order of the mesh; None for all.
        mesh_shape: of the mesh over the owners, by default that of a row.
        placements: a `Shard` or `Replicate` for each axis of the mesh; None if each owner has all.
    """

    owners: tuple[int, ...] | None = None
    mesh_shape: tuple[int, ...] | None = None
    placements: tuple[Any, ...] | None = None


ParamMeta = base.ParamMeta if hasattr(base, "Shard") else _ParamMeta
Replicate = getattr(base, "Replicate", _Replicate)
Shard = getattr(base, "Shard", _Shard)


def read_source(source: Any, rank: int) -> tuple[ReadTensors, Holdings]:
    """Return what reads this rank's tensors of a source, and what they hold.

    Args:
        source: tensors by name, plain ones or DTensors; or a `WeightSource` of vLLM. Of its `ModuleSource` each rank
            holds its shards as they are; of another one what it iterates locally, or in full if it cannot.
        rank: of the trainer.

    Raises:
        ValueError: what a source iterates is not what it declares.
    """
    if type(source) is base.ModuleSource:
        return _read_tensors(lambda: dict(source._module.named_parameters()))
    if isinstance(source, Mapping):
        return _read_tensors(lambda: source)
    declared = source.metadata() if callable(source.metadata) else source.metadata
    iterate, local = _iteration(source, declared)
    metas = {meta.name: meta for meta in declared}

    def read() -> dict[str, torch.Tensor]:
        return {name: tensor.detach().contiguous() for name, tensor in iterate() if tensor is not None}

    pieces = []
    for name, tensor in read().items():
        if name not in metas:
            raise ValueError(f"rank {rank} has {name}, which the source's metadata does not name")
        box = _box_of(metas[name], rank) if local else Box.full(tuple(metas[name].shape))
        if tuple(tensor.shape) != box.size:
            raise ValueError(f"rank {rank} has {name} of shape {tuple(tensor.shape)}: its metadata says {box.size}")
        dtype = str(tensor.dtype).removeprefix("torch.")
        if box.numel:
            pieces.append(Piece(name, box, View(name, 0, contiguous_stride(box.size)), dtype))
    return read, Holdings(tuple(pieces))


def _read_tensors(tensors: ReadTensors) -> tuple[ReadTensors, Holdings]:
    return lambda: local_shards(tensors()), Holdings(pieces_of(tensors()))


def _iteration(source: Any, declared: Iterable[Any]) -> tuple[Callable[[], Iterable[tuple[str, Any]]], bool]:
    """Return what iterates a source's tensors, and whether they are this rank's pieces rather than whole."""
    if hasattr(source, "implements_iter_local"):  # 0.33
        local = source.implements_iter_local()
        return (source.iter_local if local else source.iter_full), local
    if any(getattr(meta, "owners", None) for meta in declared):
        return source.iter_local, True
    return (lambda: source), False


def _box_of(meta: Any, rank: int) -> Box:
    """Return the box of a parameter that a rank has."""
    shape, owners, placements = tuple(meta.shape), meta.owners, meta.placements
    if not (owners and placements):
        return Box.full(shape)
    if rank not in owners:
        raise ValueError(f"rank {rank} has {meta.name}: its metadata says that ranks {tuple(owners)} own it")
    mesh = meta.mesh_shape or (len(owners),)
    coordinate = torch.unravel_index(torch.tensor(owners.index(rank)), mesh)
    rows = [_rows_of(length, dim, placements, mesh, coordinate) for dim, length in enumerate(shape)]
    return Box(tuple(start for start, _ in rows), tuple(length for _, length in rows))


def _rows_of(
    length: int, dim: int, placements: Sequence[Any], mesh: Sequence[int], coordinate: Sequence[torch.Tensor]
) -> tuple[int, int]:
    """Return the first of the rows along a dim that are at a place of a mesh, and how many there are."""
    rows = torch.arange(length)
    for placement, size, place in zip(placements, mesh, coordinate, strict=True):
        if isinstance(placement, Shard) and placement.dim == dim:
            chunks = rows.chunk(size)
            rows = chunks[int(place)] if int(place) < len(chunks) else rows[:0]
    return (int(rows[0]), len(rows)) if len(rows) else (0, 0)
