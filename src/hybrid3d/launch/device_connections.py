"""Chooses CUDA_DEVICE_MAX_CONNECTIONS, the number of hardware queues of a GPU, by what a recipe overlaps.

With one queue, kernels of all streams start in the order in which they are launched. Under tensor parallelism,
Megatron's and Transformer Engine's backward passes rely on it: they launch a collective first and the matrix product
that hides it second (`megatron/core/tensor_parallel/layers.py`). An overlapped sync (`sync.overlap`) wants more queues,
because with one the optimizer's kernels wait behind whatever the sync's stream waits for. Where a recipe has both, the
collectives decide: there are several of them in each layer of each micro batch, and one sync a step.

This has not been measured. Imports only the standard library and the recipe, as the variable must be set before CUDA
is initialized.
"""

from __future__ import annotations

import os

from hybrid3d.config import Recipe

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"


def device_connections(recipe: Recipe) -> int | None:
    """Return the number of hardware queues for training a recipe; None stands for CUDA's default, which is 8."""
    return 1 if recipe.train.tp > 1 else None


def set_device_connections(recipe: Recipe) -> None:
    """Set the variable for this process and those that it starts, unless the user has set it."""
    connections = device_connections(recipe)
    if connections is not None:
        os.environ.setdefault(VARIABLE, str(connections))
