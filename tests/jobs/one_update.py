"""Ranks that train one step, with a pass before its only update and without: tests/train/test_one_update.py.

torchrun --nproc-per-node 4 one_update.py SPEC.json OUT.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from hybrid3d import distributed
from hybrid3d.config import Recipe, load_recipe
from hybrid3d.generation.samples import RolloutBatch
from hybrid3d.inputs.models import read_config
from hybrid3d.replay.fingerprint import fingerprint_pieces
from hybrid3d.run.folder import RunFolder
from hybrid3d.run.health import Guard
from hybrid3d.run.logger import Display, RunLogger
from hybrid3d.train.megatron import runtime
from hybrid3d.train.megatron.policy import Policy
from hybrid3d.trainer import experience as experience_maker
from hybrid3d.trainer.learner import Learner
from hybrid3d.trainer.models import Models
from recorded_steps import samples_of


def train_step(recipe: Recipe, folder: RunFolder, with_pass: bool) -> dict[str, Any]:
    """Return the metrics of the step, and of each rank the passes, its old log-probabilities and its weights after."""
    group = dist.group.WORLD
    passes: list[Any] = []

    class Counted(Policy):
        def logprobs(self, *arguments: Any) -> torch.Tensor | None:
            passes.append(None)
            return super().logprobs(*arguments)

    policy = Counted(read_config(recipe.model.path), recipe, group.rank())
    guard = Guard(RunLogger(folder, group.rank(), Display(recipe.name, recipe.run.steps, None)))
    learner = Learner(recipe, Models.of(recipe, policy, group), guard, 0, group)
    decides = experience_maker.come_from_update
    if with_pass:
        experience_maker.come_from_update = lambda step, recipe: False
    try:
        experience = learner.make_experience(RolloutBatch(samples_of(0, recipe)), 0, recipe)
        metrics = experience.metrics
        metrics.update(learner.update(experience, 0, recipe))
    finally:
        experience_maker.come_from_update = decides
    row = metrics.reduce(group)
    mask = experience.batch.response_mask.bool()
    old = None if experience.old is None else experience.old[mask].tolist()
    correction = None if experience.correction is None else experience.correction[mask].tolist()
    weights = fingerprint_pieces(policy.own_source()).values
    of_rank = {"passes": len(passes), "old": old, "correction": correction, "weights": weights}
    return {"metrics": row, "ranks": distributed.gather_objects(of_rank, group)}


@record
def main(spec: str, out: str) -> None:
    torch.set_num_threads(1)
    distributed.start()
    found = {}
    for name, case in json.loads(Path(spec).read_text()).items():
        recipe = load_recipe(Path(case["recipe"]), case["settings"])
        folder = RunFolder(Path(out).with_name(name))
        runtime.initialize(recipe.train, recipe.run.seed)
        if dist.get_rank() == 0:
            folder.create(recipe)
        dist.barrier()
        found[name] = [train_step(recipe, folder, with_pass) for with_pass in (False, True)]
        runtime.shutdown()
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
