"""Chooses how a run's checkpoints save optimizers, by the memory of the nodes that it runs on."""

from __future__ import annotations

import torch.distributed as dist

from hybrid3d.config import Recipe, RecipeError
from hybrid3d.distributed import gather_objects
from hybrid3d.launch_environment import local_world_size
from hybrid3d.planning.checkpoint_memory import choose_sharding
from hybrid3d.planning.hardware import total_memory
from hybrid3d.run.logger import RunLogger
from hybrid3d.train.trained_model import DP_RESHARDABLE, FULLY_RESHARDABLE, TrainedModels, TrainEngine


def decide_sharding(
    recipe: Recipe, engine: TrainEngine, models: TrainedModels, record: RunLogger, group: dist.ProcessGroup
) -> str:
    """Return how optimizers are saved: the same on all ranks of the group, which call this together.

    Raises:
        RecipeError: `dp_reshardable` is set, and ranks have no part of a bucket.
    """
    gathered, capacity = engine.host_bytes(models, FULLY_RESHARDABLE), total_memory()
    ranks = local_world_size()
    votes = gather_objects(
        (choose_sharding(recipe.run.optimizer_sharding, ranks * gathered, capacity), ranks * gathered, capacity), group
    )
    sharding: str
    sharding, needed, memory = next((vote for vote in votes if vote[0] == DP_RESHARDABLE), votes[0])
    if sharding == DP_RESHARDABLE and not engine.can_shard_by_ranks(models, group):
        problem = f"train.dp={recipe.train.dp}: of a bucket of gradients some ranks have no part, only padding"
        if recipe.run.optimizer_sharding != "auto":
            fix = "lower train.dp, or set run.optimizer_sharding=fully_reshardable"
            raise RecipeError(recipe.name, [f"run.optimizer_sharding={sharding}: {problem}: {fix}"])
        sharding = FULLY_RESHARDABLE
    fields = {"sharding": sharding, "gathered_bytes": needed, "node_bytes": memory}
    message = ""
    if sharding == DP_RESHARDABLE and recipe.run.optimizer_sharding == "auto":
        message = (
            f"checkpoints save each rank's shard of the optimizer (dp_reshardable), as gathered they would take "
            f"{needed / 1e9:.0f} GB of a node's {memory / 1e9:.0f} GB: only train.dp can differ where they are loaded"
        )
    record.event("optimizer_sharding", message, **fields)
    return sharding
