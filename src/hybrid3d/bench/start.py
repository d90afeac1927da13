"""The body of `hybrid3d bench`: what a rank does once the ranks have met."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch.distributed.distributed_c10d import Store

from hybrid3d import distributed
from hybrid3d.bench import report
from hybrid3d.bench.scaling import write_model
from hybrid3d.config import Recipe
from hybrid3d.distributed import RoleGroups
from hybrid3d.families import Config
from hybrid3d.ledger import RankStart, share
from hybrid3d.planning.agreed_placement import choose_placement
from hybrid3d.run.folder import RunFolder

if TYPE_CHECKING:
    from hybrid3d.bench.task import Bench


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

    Args:
        scaling: describes how the model was scaled down.
        changed: also measure syncs of this fraction of all elements.
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
