"""Ranks that train with made-up samples, without vLLM, and record each step: tests/replay/test_replay.py.

torchrun --nproc-per-node 2 recorded_steps.py SPEC.json

Each run is trained by the real loop; then steps are trained again with one bit of one weight of one rank flipped.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from hybrid3d import distributed
from hybrid3d.config import Recipe, load_recipe
from hybrid3d.generation.evaluation import EvalResult
from hybrid3d.generation.samples import RolloutBatch, Sample
from hybrid3d.reshard.ends import NamedTensors
from hybrid3d.run.folder import RunFolder, checkpoint_folder
from hybrid3d.run.health import Guard
from hybrid3d.run.live_settings import LiveSettings
from hybrid3d.run.logger import Display, RunLogger
from hybrid3d.run.metrics import PhaseTimer, StepMetrics
from hybrid3d.sync import SyncReport
from hybrid3d.train.megatron import checkpoint, runtime
from hybrid3d.trainer.checkpoints import Checkpoints, Progress
from hybrid3d.trainer.models import Models
from hybrid3d.trainer.rl import train_rl
from hybrid3d.trainer.step_log import StepLog
from hybrid3d.trainer.step_recorder import StepRecorder
from hybrid3d.trainer.trainer import GeneratorInputs, Trainer

INTEGERS = {2: torch.int16, 4: torch.int32}


class MadeUpSamples:
    """Implements `Generator` without an engine."""

    shares_devices = False
    activities: Mapping[str, str] = MappingProxyType({})

    def __init__(self, inputs: GeneratorInputs):
        pass

    def sync(self, version: int, recipe: Recipe) -> SyncReport:
        return SyncReport(0.0, 0.0, 0, 0, 0, 0, 0, 0, 0)

    def evaluate(self, version: int, recipe: Recipe) -> EvalResult:
        return EvalResult({"eval/accuracy": 0.0, "eval/reward": 0.0}, {})

    def generate_batch(self, version: int, batch: int, recipe: Recipe) -> RolloutBatch:
        return RolloutBatch(samples_of(version, recipe))

    def begin_update(self, step: int, recipe: Recipe) -> None:
        pass

    def end_update(self, recipe: Recipe) -> StepMetrics:
        return StepMetrics()

    def restore(self, progress: Progress) -> None:
        pass

    begin = end = leave = close = lambda self: None


def samples_of(step: int, recipe: Recipe) -> list[Sample]:
    """Samples of a step: answers of unlike lengths, with tokens that the policy did not generate."""
    dice = random.Random(step)
    found = [sample_of(dice, step) for _ in range(recipe.sequences_per_step)]
    return [replace(one, truncated=len(one.tokens) >= recipe.rollout.max_new_tokens) for one in found]


def sample_of(dice: random.Random, step: int) -> Sample:
    prompt, answer = ([dice.randrange(4, 300) for _ in range(dice.randrange(2, 9))] for _ in range(2))
    mask = [True, *(dice.random() < 0.8 for _ in answer[1:])]
    versions = [max(0, step - dice.randrange(2)) for _ in answer]
    logprobs = [-dice.random() * 10 for _ in range(sum(mask))]
    return Sample("?", tuple(prompt), tuple(answer), tuple(mask), tuple(logprobs), "!", dice.random(), tuple(versions))


def flip(models: Models, fault: dict[str, Any], rank: int) -> list[Any]:
    """Flip a bit of one element of one of this rank's weights; return the rank and the tensor, on all ranks."""
    dice, found = random.Random(fault["seed"]), None
    on = dice.randrange(dist.get_world_size())
    if rank == on:
        name, model = dice.choice(sorted(models.trained.items()))
        piece = dice.choice(model.weights.pieces)
        values = NamedTensors(model.weights.tensors).read(piece).detach()
        place = tuple(dice.randrange(n) for n in values.shape)
        bits = values.view(INTEGERS[values.itemsize])
        bits[place] ^= 1 << dice.randrange(8 * values.itemsize - 1)
        found = [on, f"{name}/{piece.name}"]
    return distributed.gather_objects(found, dist.group.WORLD)[on]


def train_faulty(trainer: Trainer, recipe: Recipe, start: Path, out: Path, fault: dict[str, Any]) -> None:
    """Train from a checkpoint to the step of a fault, and write what was done to `fault.json`."""
    group, rank = dist.group.WORLD, dist.get_rank()
    models, folder = trainer.models, RunFolder(out)
    trainer.restore(Progress.from_json(checkpoint.load(models.trained, start, group)), recipe)
    recorder = StepRecorder(models, folder, group)
    for step in range(fault["from"], fault["step"] + 1):
        generated, timer = RolloutBatch(samples_of(step, recipe)), PhaseTimer()
        if step == fault["step"] and fault["before"]:
            done = flip(models, fault, rank)
        experience = trainer.make_experience(generated, step, recipe)
        recorder.begin(step, recipe, trainer.progress, timer)
        metrics = experience.metrics
        metrics.update(trainer.update(experience, step, recipe))
        if step == fault["step"] and not fault["before"]:
            done = flip(models, fault, rank)
        recorder.finish(step, recipe, generated, experience, metrics.reduce(group), timer)
    if rank == 0:
        folder.create(recipe)
        (out / "fault.json").write_text(json.dumps({**fault, "done": done}))


def train_run(recipe: Recipe, folder: RunFolder, faults: list[dict[str, Any]]) -> None:
    group, rank = dist.group.WORLD, dist.get_rank()
    runtime.initialize(recipe.train, recipe.run.seed)
    if rank == 0:
        folder.create(recipe)
    dist.barrier()
    run_record = RunLogger(folder, rank, Display(recipe.name, recipe.run.steps, None))
    live, guard = LiveSettings(recipe, run_record, {}, group), Guard(run_record)
    trainer = Trainer(recipe, group, MadeUpSamples, guard)
    models = trainer.models
    checkpoints = Checkpoints(models.trained, run_record, group)
    recorder = StepRecorder(models, folder, group)
    train_rl(trainer, live, checkpoints, StepLog(trainer, run_record, recorder, guard, group))
    for fault in faults:
        start = checkpoint_folder(folder, fault["from"])
        train_faulty(trainer, recipe, start, folder.path.with_name(f"{folder.path.name}-fault-{fault['seed']}"), fault)
    runtime.shutdown()


@record
def main(spec: str) -> None:
    torch.set_num_threads(1)
    distributed.start()
    for case in json.loads(Path(spec).read_text()):
        recipe = load_recipe(case["recipe"], case["settings"])
        train_run(recipe, RunFolder.for_recipe(recipe), case["faults"])
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
