"""Computes the placement, the slot of each rank in the rollout layout, once, and makes it known to every rank.

This comes before the engines start, because vLLM builds its process groups from it. Both engines are queried in another
process, by the launcher while ranks start, or by rank 0: `python -m hybrid3d.planning.agreed_placement RECIPE.yaml
ANSWER` writes the slots as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from torch.distributed.distributed_c10d import PrefixStore, Store

from hybrid3d import launch_environment
from hybrid3d.config import Recipe
from hybrid3d.config.load import load_derived
from hybrid3d.inputs.models import read_config
from hybrid3d.ledger import share
from hybrid3d.planning.engine_queries import query_engines
from hybrid3d.planning.kept_placement import EngineQueryFailed, find_placement, is_computed
from hybrid3d.reshard.plan.classes import TensorClass, classify_tensors, rank_groups, signature_of
from hybrid3d.reshard.plan.layout import Demand, Holdings
from hybrid3d.reshard.plan.placement import MissingBytes, assign_slots, consecutive_slots, count_missing_bytes


def choose_placement(recipe: Recipe, store: Store, folder: Path, restart_count: int) -> tuple[int, ...]:
    """Return the slot of each rank that generates, which rank 0 computes and shares through the store.

    Slots are numbered over all engines: engine e has `rollout.tp` x `rollout.dp` slots, from e times that number on.

    Args:
        store: the store of the rendezvous, as the default process group does not exist yet.
        folder: that of the run, in which the placement is kept: see `kept_placement.py`.
        restart_count: how often the ranks have been started again.

    Raises:
        RuntimeError: on every rank, if rank 0 could not query the engines.
    """
    if not is_computed(recipe):
        return tuple(consecutive_slots(recipe.generation_ranks).tolist())

    def find() -> Sequence[int] | str:
        try:
            return find_placement(recipe, folder)
        except EngineQueryFailed as error:
            return str(error)

    slots_or_error = share(PrefixStore(f"start/{restart_count}", store), launch_environment.rank(), "slots", find)
    if isinstance(slots_or_error, str):
        raise RuntimeError(f"the placement of ranks could not be computed: {slots_or_error}")
    return tuple(slots_or_error)


def compute_slots(recipe: Recipe) -> list[int]:
    """Query both engines in this process, and return the slot of each rank as `debug.placement` says."""
    answers = query_engines(recipe, read_config(recipe.model.path))
    demands = [slot.demand for slot in answers.slots]
    slots: list[int] = compute_placement(recipe, answers.holdings, demands, answers.multiplicity).slots.tolist()
    return slots


@dataclass(frozen=True)
class Placement:
    """The slot of each rank, and the counts that it was chosen by.

    Attributes:
        slots: the slot of each rank that generates, numbered over all engines.
        missing: the bytes that these ranks, and their nodes, lack of what each slot wants.
        classes: all tensors, by class.
        holders: the ranks of each group of ranks that hold the same pieces.
        first: the first rank that generates.
    """

    slots: np.ndarray
    missing: MissingBytes
    classes: Sequence[TensorClass]
    holders: Sequence[Sequence[int]]
    first: int = 0

    def readers(self, slots: int) -> list[list[int]]:
        """Return for each of the `slots` slots of an engine the ranks that have it, one in each engine."""
        return [(self.first + np.flatnonzero(self.slots % slots == slot)).tolist() for slot in range(slots)]

    def demand(self, wanted: Sequence[Demand]) -> dict[int, Demand]:
        """Return what each rank wants, from what each slot of an engine wants."""
        return {self.first + i: wanted[slot % len(wanted)] for i, slot in enumerate(self.slots)}


def compute_placement(
    recipe: Recipe,
    holdings: Mapping[int, Holdings],
    wanted: Sequence[Demand],
    multiplicity: Mapping[str, int] | None = None,
) -> Placement:
    """Return the placement that `debug.placement` selects: of least bytes, or in rank order.

    Args:
        holdings: what each rank of the train layout holds.
        wanted: what each slot of one engine wants.
        multiplicity: the number of tensors that each name stands for; 1 by default.
    """
    assert recipe.rollout is not None, "checked when the recipe was read"
    world, per_node = recipe.sync_ranks, recipe.machine.gpus_per_node
    groups = rank_groups(holdings)
    holders = [ranks for ranks, _ in groups]
    readers = [signature_of(demand) for demand in wanted]
    classes = classify_tensors([signature for _, signature in groups], readers, multiplicity)
    generating = recipe.role_ranks["generation"]
    first, without = generating.start, [generating] if recipe.is_split else []
    missing = count_missing_bytes(classes, [*holders, *without], len(wanted), world, per_node)
    missing = replace(missing, group=missing.group[first:], node=missing.node[first:])
    if recipe.debug.placement == "overlap" and not recipe.is_split:
        slots = assign_slots(missing, len(wanted), recipe.rollout.tp, per_node)
    else:
        slots = consecutive_slots(recipe.generation_ranks)
    return Placement(slots, missing, classes, holders, first)


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(compute_slots(load_derived(sys.argv[1]))), encoding="utf-8")
