"""Ask Megatron about a run that does not run: any rank of any world, on meta, in this one process."""

from __future__ import annotations

import torch

from hybrid3d.config import Recipe, Train
from hybrid3d.families import Config
from hybrid3d.reshard.layout import Holdings, Shape
from hybrid3d.train.model import build_model
from hybrid3d.train.runtime import as_rank
from hybrid3d.train.weights import canonical_shapes, megatron_weights


def expected_shapes(config: Config) -> dict[str, Shape]:
    """Every canonical tensor that a checkpoint of this config must have, and its full shape."""
    return canonical_shapes(_holdings(config, Train(), 0, 1, torch.float32).pieces)


def holdings_of_all(config: Config, recipe: Recipe) -> dict[int, Holdings]:
    """What each rank of the recipe's train layout holds."""
    dtype, world = getattr(torch, recipe.model.dtype), recipe.world_size
    return {rank: _holdings(config, recipe.train, rank, world, dtype) for rank in range(world)}


def _holdings(config: Config, layout: Train, rank: int, world_size: int, dtype: torch.dtype) -> Holdings:
    with as_rank(rank, layout, world_size):
        return megatron_weights(build_model(config, layout, dtype, meta=True), config).holdings
