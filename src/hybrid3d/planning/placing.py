"""Where each rank generates: its slot in the rollout layout, chosen before engines start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch.distributed as dist

from hybrid3d import ranks
from hybrid3d.config import Recipe, load_recipe, recipe_to_yaml
from hybrid3d.inputs import read_config
from hybrid3d.planning.sides import ask
from hybrid3d.reshard.classes import TensorClass, classes_of, distinct
from hybrid3d.reshard.layout import Demand, Holdings
from hybrid3d.reshard.placement import Lacking, consecutive, lacking, place

_KEY = "slots"
_PATIENCE = timedelta(minutes=10)  # asking both engines about the largest models takes a minute
_OF_A_RANK = ("RANK", "LOCAL_", "GROUP_", "ROLE_", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_")


def agree(recipe: Recipe, store: dist.Store) -> tuple[int, ...]:
    """The slot of each rank of a run, which rank 0 chooses before the default process group is there.

    Args:
        store: through which the ranks can talk by then.

    Raises:
        RuntimeError: (on rank 0) what the engines answered instead.
    """
    if not _is_free(recipe):
        return tuple(consecutive(recipe.world_size).tolist())
    if ranks.rank() == 0:
        store.set(_KEY, json.dumps(_chosen_apart(recipe)))
    store.wait([_KEY], _PATIENCE)
    return tuple(json.loads(store.get(_KEY)))


def _is_free(recipe: Recipe) -> bool:
    """Whether there is anything to choose."""
    rollout = recipe.rollout
    return rollout is not None and rollout.placement == "overlap" and rollout.tp * rollout.dp > 1


def _chosen_apart(recipe: Recipe) -> list[int]:
    """Choose in a process of its own: vLLM keeps parts of the models that were asked for those that run."""
    with tempfile.TemporaryDirectory() as folder:
        said, chosen = Path(folder) / "recipe.yaml", Path(folder) / "slots.json"
        said.write_text(recipe_to_yaml(recipe))
        alone = {key: value for key, value in os.environ.items() if not key.startswith(_OF_A_RANK)}
        command = [sys.executable, "-m", "hybrid3d.planning.placing", str(said), str(chosen)]
        done = subprocess.run(command, env=alone, stderr=subprocess.PIPE, text=True, timeout=_PATIENCE.total_seconds())
        sys.stderr.write(done.stderr)
        if done.returncode:
            raise RuntimeError(
                f"asking both engines where to place ranks failed: {done.stderr.strip().splitlines()[-1]}"
            )
        found: list[int] = json.loads(chosen.read_text())
        return found


def choose(recipe: Recipe) -> list[int]:
    """The slot of each rank, from what both engines say."""
    sides = ask(recipe, read_config(recipe.model.path))
    slots: list[int] = placed(recipe, sides.holdings, [one.demand for one in sides.slots], sides.times).slots.tolist()
    return slots


@dataclass(frozen=True)
class Placed:
    """Where ranks generate: the slot of each, and what was counted to choose it."""

    slots: np.ndarray
    lacks: Lacking
    classes: Sequence[TensorClass]
    holders: Sequence[Sequence[int]]

    def readers(self, slots: int) -> list[list[int]]:
        """The ranks that have each slot of some engine."""
        return [np.flatnonzero(self.slots % slots == slot).tolist() for slot in range(slots)]


def placed(
    recipe: Recipe, holdings: Mapping[int, Holdings], wanted: Sequence[Demand], times: Mapping[str, int] | None = None
) -> Placed:
    """Place a recipe's ranks.

    Args:
        wanted: what each slot of an engine wants.
        times: how often a tensor counts, where it stands for others.
    """
    assert recipe.rollout is not None
    world, per_node = recipe.world_size, recipe.machine.gpus_per_node
    groups = distinct(holdings)
    holders = [ranks for ranks, _ in groups]
    classes = classes_of([side for _, side in groups], wanted, times)
    lacks = lacking(classes, holders, len(wanted), world, per_node)
    chosen = recipe.rollout.placement == "overlap"
    slots = place(lacks, len(wanted), recipe.rollout.tp, per_node) if chosen else consecutive(world)
    return Placed(slots, lacks, classes, holders)


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(choose(load_recipe(sys.argv[1]))))
