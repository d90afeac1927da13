"""Chooses the slot of each rank in the rollout layout, before the engines start."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch.distributed as dist

from hybrid3d import distributed
from hybrid3d.config import Recipe, load_recipe
from hybrid3d.inputs.models import read_config
from hybrid3d.planning.engine_queries import query_engines
from hybrid3d.planning.isolated import ENGINE_QUERY_TIMEOUT, EngineQueryFailed, run_in_subprocess
from hybrid3d.reshard.classes import TensorClass, classify_tensors, rank_groups, signature_of
from hybrid3d.reshard.layout import Demand, Holdings
from hybrid3d.reshard.placement import MissingBytes, assign_slots, consecutive_slots, count_missing_bytes

_KEY = "slots"


def broadcast_placement(recipe: Recipe, store: dist.Store) -> tuple[int, ...]:
    """Return the slot of each rank; rank 0 computes it and broadcasts it through the store.

    Args:
        store: the ranks' store; the default process group does not exist yet.

    Raises:
        RuntimeError: on every rank, if querying the engines failed.
    """
    rollout = recipe.rollout
    if rollout is None or rollout.placement == "consecutive" or rollout.tp * rollout.dp == 1:
        return tuple(consecutive_slots(recipe.world_size).tolist())
    if distributed.rank() == 0:
        try:
            store.set(_KEY, run_in_subprocess("hybrid3d.planning.agreed_placement", recipe))
        except EngineQueryFailed as error:
            store.set(_KEY, json.dumps(str(error)))
    store.wait([_KEY], ENGINE_QUERY_TIMEOUT + timedelta(minutes=5))
    found = json.loads(store.get(_KEY))
    if isinstance(found, str):
        raise RuntimeError(f"the placement of ranks could not be computed: {found}")
    return tuple(found)


def compute_slots(recipe: Recipe) -> list[int]:
    """Query both engines, and return the slot of each rank."""
    answers = query_engines(recipe, read_config(recipe.model.path))
    slots: list[int] = compute_placement(
        recipe, answers.holdings, [one.demand for one in answers.slots], answers.multiplicity
    ).slots.tolist()
    return slots


@dataclass(frozen=True)
class Placement:
    """The slot of each rank, and the counts by which it was chosen."""

    slots: np.ndarray
    missing: MissingBytes
    classes: Sequence[TensorClass]
    holders: Sequence[Sequence[int]]

    def readers(self, slots: int) -> list[list[int]]:
        """Return the ranks that have each of the `slots` slots of an engine."""
        return [np.flatnonzero(self.slots % slots == slot).tolist() for slot in range(slots)]


def compute_placement(
    recipe: Recipe,
    holdings: Mapping[int, Holdings],
    wanted: Sequence[Demand],
    multiplicity: Mapping[str, int] | None = None,
) -> Placement:
    """Choose the slot of each rank as `rollout.placement` says.

    Args:
        wanted: what each slot of an engine wants.
        multiplicity: the number of tensors that each name represents; 1 by default.
    """
    assert recipe.rollout is not None
    world, per_node = recipe.world_size, recipe.machine.gpus_per_node
    groups = rank_groups(holdings)
    holders = [ranks for ranks, _ in groups]
    classes = classify_tensors([side for _, side in groups], [signature_of(one) for one in wanted], multiplicity)
    missing = count_missing_bytes(classes, holders, len(wanted), world, per_node)
    chosen = recipe.rollout.placement == "overlap"
    slots = assign_slots(missing, len(wanted), recipe.rollout.tp, per_node) if chosen else consecutive_slots(world)
    return Placement(slots, missing, classes, holders)


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(compute_slots(load_recipe(sys.argv[1]))))
