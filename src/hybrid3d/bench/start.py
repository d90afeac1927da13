"""The body of `hybrid3d bench`: whether it fits this machine's memory, and what a rank does once the ranks have met."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.distributed.distributed_c10d import Store

from hybrid3d import distributed, launch_environment
from hybrid3d.bench import report
from hybrid3d.bench.scaling import write_model
from hybrid3d.config import Recipe, RecipeError
from hybrid3d.config.load import load_derived
from hybrid3d.distributed import RoleGroups
from hybrid3d.families import Config
from hybrid3d.inputs.models import read_config
from hybrid3d.ledger import RankStart, share
from hybrid3d.planning.agreed_placement import choose_placement, run_in_subprocess
from hybrid3d.planning.engine_queries import query_engines
from hybrid3d.planning.hardware import available_memory
from hybrid3d.planning.traffic import compute_sync_traffic
from hybrid3d.process import kill_when_parent_exits
from hybrid3d.run.folder import RunFolder

if TYPE_CHECKING:
    from hybrid3d.bench.task import Bench

PROCESS_BYTES = 1_500_000_000  # of a rank that has imported both engines, without a model; measured on a CPU


def check_benchmark_memory(recipe: Recipe, config: Config, changed: float | None = None) -> None:
    """Check that both engines' weights and the buffers of all methods fit. Under a launcher, only rank 0 checks.

    Raises:
        RecipeError: they do not fit; the message has the needed and the available bytes.
    """
    if launch_environment.under_launcher() and launch_environment.rank() > 0:
        return
    write_model(recipe, config)
    required, gpu_free = json.loads(run_in_subprocess("hybrid3d.bench.start", recipe))
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


def bench(
    recipe: Recipe,
    config: Config,
    scaling: str,
    folder: RunFolder,
    repeats: int,
    changed: float | None,
    as_json: bool,
    start: RankStart,
) -> None:
    """Measure the sync of a model of this config, a gather on every rank, and the network itself.

    `scaling` describes how the model was scaled down. Syncs of the fraction `changed` of all elements are measured too,
    if it is not None.
    """
    console = start.console
    print_status = console.print if console is not None and not as_json else lambda message: None
    measurements = build_bench(recipe, config, folder, changed, start, print_status).measure(repeats)
    if start.rank == 0:
        numbers = report.summarize(recipe, scaling, measurements, changed)
        report.write_results(folder, numbers)
        if console is not None:
            text = json.dumps(numbers, indent=2) if as_json else report.format_table(numbers)
            console.print(text, highlight=False, markup=False, soft_wrap=True)


def build_bench(
    recipe: Recipe,
    config: Config,
    folder: RunFolder,
    changed: float | None,
    start: RankStart,
    on_progress: Callable[[str], None],
) -> Bench:
    """Write the model's config on rank 0, and build the engines of this rank. Every rank calls it together."""
    share(start.store, start.rank, "model", lambda: write_model(recipe, config))
    slots = choose_placement(recipe, start.store, folder.path, start.progress.restart_count)
    groups = start_groups(recipe, start.store)
    from hybrid3d.bench.task import Bench  # imports the engines

    return Bench(recipe, groups, slots, changed, on_progress)


def start_groups(recipe: Recipe, store: Store) -> RoleGroups:
    """Create the process groups of a benchmark's rank, and Megatron's if it trains."""
    from hybrid3d.train.megatron import runtime

    if recipe.is_split:
        groups = distributed.start_roles(store, recipe.role_ranks)
    else:
        group = distributed.start(store)
        groups = RoleGroups(group, group, group, store)
    if groups.everyone.rank() in recipe.role_ranks["train"]:
        runtime.initialize(recipe.train, recipe.run.seed)
    return groups


if __name__ == "__main__":
    kill_when_parent_exits()
    required = required_bytes(load_derived(sys.argv[1]))
    # Of the first GPU. It comes last, because asking takes a CUDA context for this process
    free_gpu_bytes = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else None
    Path(sys.argv[2]).write_text(json.dumps((required, free_gpu_bytes)), encoding="utf-8")
