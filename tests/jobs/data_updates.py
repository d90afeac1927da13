"""One rank that trains on answers of data, `sft` and `dpo`, in several layouts: tests/train/test_data_updates.py.

    torchrun --nproc-per-node 4 data_updates.py SPEC.json OUT.json

`SPEC.json` has `model` (a checkpoint), `data` (settings of that section, by algorithm), `optimizer`, `steps`, and
`cases`: by name, settings of `train` and of `algorithm`.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from hybrid3d import distributed
from hybrid3d.config import Algorithm, Data, Model, Optimizer, Recipe, Run, Train
from hybrid3d.config.sections.algorithm import Preference
from hybrid3d.inputs.models import read_config
from hybrid3d.train.megatron import runtime
from hybrid3d.train.megatron.policy import Policy
from hybrid3d.trainer.data_loops import DpoUpdates, SftUpdates
from hybrid3d.trainer.models import reference_of


def recipe_for(spec: dict[str, Any], train: dict[str, Any], algorithm: dict[str, Any]) -> Recipe:
    preference = Preference(**algorithm.get("preference", {}))
    return Recipe(
        name="data-updates",
        model=Model(path=spec["model"], dtype="float32"),
        train=Train(**train),
        data=Data(**spec["data"][algorithm["name"]]),
        algorithm=Algorithm(**{**algorithm, "preference": preference}),
        optimizer=Optimizer(**spec["optimizer"]),
        run=Run(steps=spec["steps"]),
    )


def one_case(recipe: Recipe) -> dict[str, Any]:
    runtime.initialize(recipe.train, seed=1)
    policy = Policy(read_config(recipe.model.path), recipe, dist.get_rank())
    is_dpo, reference = recipe.algorithm.name == "dpo", None
    if recipe.algorithm.uses_reference:
        reference = reference_of(recipe, policy, dist.get_rank())
    updates = DpoUpdates(recipe, policy, reference) if is_dpo else SftUpdates(recipe, policy)
    rows = []
    for step in range(recipe.run.steps):
        report, metrics, _ = updates.update(step, recipe, math.isfinite)
        policy.end_step()
        rows.append({"grad_norm": report.grad_norm, **metrics.reduce(dist.group.WORLD)})
    held_out = updates.evaluate(recipe).reduce(dist.group.WORLD)
    for module in policy._modules:  # which autograd and Megatron's DDP keep alive
        module.__dict__.clear()
    runtime.shutdown()
    return {"rows": rows, "held_out": held_out}


@record
def main(path: str, out: str) -> None:
    spec = json.loads(Path(path).read_text())
    distributed.start()
    found = {name: one_case(recipe_for(spec, *case)) for name, case in spec["cases"].items()}
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
