"""Estimates the host memory of a node that writing a checkpoint takes, and chooses how optimizers are saved by it.

`fully_reshardable` makes the optimizer state of its whole data-parallel group in each rank's host memory: three float32
numbers for each element that the rank trains, whatever the number of data-parallel ranks. With `dp_reshardable` each
rank has its own shard there. Both have the rank's trained weights, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybrid3d.config import Recipe
from hybrid3d.planning.hardware import Hardware
from hybrid3d.planning.memory import FLOAT32, StageMemory
from hybrid3d.reshard.plan.layout import ITEMSIZE

SAVED = 3 * FLOAT32  # bytes of an element: the main weight and Adam's two moments
GATHERED_FRACTION = 0.5  # of a node's memory; the rest is for processes, offloaded tensors and the page cache


@dataclass(frozen=True)
class CheckpointMemory:
    """Host memory in bytes that a checkpoint takes on the fullest node.

    Attributes:
        sharding: how optimizers are saved.
        node: what that takes.
        gathered: what `fully_reshardable` takes.
        capacity: the memory of a node.
    """

    sharding: str
    node: int
    gathered: int
    capacity: int


def choose_sharding(setting: str, gathered: float, capacity: float) -> str:
    """Return how optimizers are saved: as set or, with `auto`, so that any layout can load them if that fits the node.

    Args:
        setting: `run.optimizer_sharding`.
        gathered: bytes of optimizer state that `fully_reshardable` makes in a node's host memory.
        capacity: the node's memory in bytes.
    """
    if setting != "auto":
        return setting
    return "fully_reshardable" if gathered <= GATHERED_FRACTION * capacity else "dp_reshardable"


def estimate_checkpoint(recipe: Recipe, stages: Sequence[StageMemory], hardware: Hardware) -> CheckpointMemory:
    """Estimate what a checkpoint takes, if a node had ranks of the fullest stage only."""
    ranks = min(recipe.machine.gpus_per_node, recipe.train_ranks)
    kept = FLOAT32 * (2 if ITEMSIZE[recipe.model.dtype] == FLOAT32 else 3)  # bytes of an element's state on the GPU
    trained = [stage.gradients // FLOAT32 for stage in stages]  # elements
    weights = [ITEMSIZE[recipe.model.dtype] * elements for elements in trained]
    gathered = ranks * max(saved + SAVED * elements for saved, elements in zip(weights, trained, strict=True))
    shards = ranks * max(saved + s.optimizer * SAVED // kept for saved, s in zip(weights, stages, strict=True))
    sharding = choose_sharding(recipe.run.optimizer_sharding, ranks * SAVED * max(trained), hardware.host_bytes)
    node = gathered if sharding == "fully_reshardable" else shards
    return CheckpointMemory(sharding, node, gathered, int(hardware.host_bytes))
