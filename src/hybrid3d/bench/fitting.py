"""Checks whether a benchmark fits this machine's memory, before it starts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from hybrid3d import launch_environment
from hybrid3d.bench.scaling import write_model
from hybrid3d.config import Recipe, RecipeError
from hybrid3d.config.load import load_derived
from hybrid3d.families import Config
from hybrid3d.inputs.models import read_config
from hybrid3d.planning.agreed_placement import run_in_subprocess
from hybrid3d.planning.engine_queries import query_engines
from hybrid3d.planning.hardware import available_memory
from hybrid3d.planning.traffic import compute_sync_traffic

PROCESS_BYTES = 1_500_000_000  # of a rank that has imported both engines, without a model; measured on a CPU


def check_benchmark_memory(recipe: Recipe, config: Config, changed: float | None = None) -> None:
    """Check that both engines' weights and the buffers of all methods fit. Under a launcher, only rank 0 checks.

    Args:
        changed: the fraction of elements that syncs of changed elements send, if they are measured.

    Raises:
        RecipeError: they do not fit; the message has the needed and the available bytes.
    """
    if launch_environment.under_launcher() and launch_environment.rank() > 0:
        return
    write_model(recipe, config)
    required, gpu_free = json.loads(run_in_subprocess("hybrid3d.bench.fitting", recipe))
    fullest, together = required[changed is not None]
    if gpu_free is not None:
        needed, free = fullest, gpu_free
    else:
        here = launch_environment.local_world_size() if launch_environment.under_launcher() else recipe.world_size
        needed, free = together * here // recipe.world_size + here * PROCESS_BYTES, available_memory()
    if needed > free:
        problem = f"it takes {needed / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free"
        raise RecipeError(recipe.name, [f"{problem}: scale it down with --layers, --hidden or --experts"])


def required_bytes(recipe: Recipe) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the bytes of the fullest rank and of all ranks: buffers and weights (vLLM's count twice).

    The second pair is with syncs of changed elements: bitmaps, and staging memory, which is as large as if all elements
    had changed.
    """
    config = read_config(recipe.model.path)
    found = compute_sync_traffic(recipe, query_engines(recipe, config))
    wire = found.traffic.sum(0) + found.traffic.sum(1) + 2 * found.local
    staging = 2 * found.staging + found.finalize + 4 * recipe.sync.bucket_bytes
    each = found.held + 2 * found.wanted + wire + staging
    changed = each + found.held // 8 + 2 * found.staging
    return (int(each.max()), int(each.sum())), (int(changed.max()), int(changed.sum()))


def free_gpu_bytes() -> int | None:
    """Return the free bytes of the first GPU; None if there is no GPU. Takes a CUDA context for this process."""
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else None


if __name__ == "__main__":
    answers = required_bytes(load_derived(sys.argv[1])), free_gpu_bytes()
    Path(sys.argv[2]).write_text(json.dumps(answers), encoding="utf-8")
