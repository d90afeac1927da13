"""Describes a rank's Megatron weights as pieces of canonical tensors, read from its `sharded_state_dict()`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.models.gpt.gpt_model import GPTModel

from hybrid3d.families import Config, Family, UnsupportedModel, family_of
from hybrid3d.reshard.plan.box import Box
from hybrid3d.reshard.plan.layout import Demand, Fill, Holdings, Piece, View

ADAPTERS = "adapters"
"""The attribute of a stage with its adapters, which are not among the weights of the model itself."""

# Selects the format in which a layer's number is part of the name, and gate and up are one global tensor.
METADATA = {"non_homogeneous_layers": True, "singleton_local_shards": False}


@dataclass(frozen=True)
class MegatronWeights:
    """One rank's weights: live tensors by local name, the pieces that they consist of, and padding rows.

    Attributes:
        parts: by local name, all canonical tensors that Megatron's whole tensor consists of, also those that other
            tensor-parallel ranks hold.
    """

    tensors: Mapping[str, torch.Tensor]
    pieces: tuple[Piece, ...]
    padding: tuple[Fill, ...] = ()
    parts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def holdings(self) -> Holdings:
        return Holdings(self.pieces)

    @property
    def demand(self) -> Demand:
        """The demand of loading a checkpoint: every piece, including replicas."""
        return Demand(self.pieces, self.padding)


def megatron_weights(stages: Sequence[GPTModel], config: Config, family: Family | None = None) -> MegatronWeights:
    """Return the weights of a rank's model (one module per virtual pipeline stage), as Megatron declares them.

    Args:
        family: the family whose table names the weights; None selects the config's.

    Raises:
        UnsupportedModel: Megatron declares a tensor that is not in the family's table.
    """
    family = family or family_of(config)
    tensors: dict[str, torch.Tensor] = {}
    pieces: list[Piece] = []
    padding: list[Fill] = []
    unclaimed: list[str] = []
    parts: dict[str, dict[str, None]] = {}
    for local, base, shard in _shards(stages):
        tensors[local] = base
        # A prepended axis is that of experts: layers are numbered in names (see METADATA).
        front = shard.prepend_axis_num
        expert = shard.global_offset[0] if front else None
        shape, start = shard.global_shape[front:], shard.global_offset[front:]
        row_ranges = family.row_ranges(shard.key, shape[0], config, expert)
        if row_ranges is None:
            unclaimed.append(shard.key)
            continue
        parts.setdefault(local, {}).update({r.name: None for r in row_ranges if r.name is not None})
        first, rows = start[0], shard.local_shape[0]
        for row_range in row_ranges:
            low, high = max(first, row_range.start), min(first + rows, row_range.start + row_range.rows)
            if low >= high:
                continue
            stride = shard.data.stride()
            offset = shard.data.storage_offset() - base.storage_offset() + (low - first) * stride[0]
            view, size = View(local, offset, stride), (high - low, *shard.local_shape[1:])
            if row_range.name is None:
                padding.append(Fill(view, size, 0.0))
            else:
                box = Box((row_range.canonical_start + low - row_range.start, *start[1:]), size)
                pieces.append(Piece(row_range.name, box, view, str(shard.data.dtype).removeprefix("torch.")))
    if unclaimed:
        names = ", ".join(sorted(set(unclaimed))[:20])
        raise UnsupportedModel(
            f"{len(set(unclaimed))} tensors of Megatron are not in the table of {family.architecture}: {names}"
        )
    return MegatronWeights(tensors, tuple(pieces), tuple(padding), {k: tuple(names) for k, names in parts.items()})


def _shards(stages: Sequence[GPTModel]) -> Iterator[tuple[str, torch.Tensor, ShardedTensor]]:
    """Yield (local name, live parameter or buffer, a shard whose data is a view of it) of all weights of a rank."""
    for number, stage in enumerate(stages):
        for name, entry in stage.sharded_state_dict(metadata=dict(METADATA)).items():
            if isinstance(entry, ShardedObject):  # Transformer Engine's FP8 state, which is empty here
                continue
            if name.startswith(f"{ADAPTERS}."):
                continue
            built = entry.build() if isinstance(entry, ShardedTensorFactory) else entry
            for shard in built if isinstance(built, list) else [built]:
                if shard.data.untyped_storage()._cdata != entry.data.untyped_storage()._cdata:
                    raise UnsupportedModel(
                        f"{shard.key}: Megatron's sharded_state_dict() returns a copy, not the live tensor"
                    )
                yield f"stage{number}.{name}", entry.data, shard
