"""The bodies of `hybrid3d train`, `eval` and `replay`: what a rank does once the ranks have met, and its roles."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from hybrid3d import distributed, launch_environment
from hybrid3d.config import Recipe, RecipeError
from hybrid3d.families import family_of
from hybrid3d.generation.evaluation import format_files, format_result
from hybrid3d.inputs.models import read_config, read_tokenizer
from hybrid3d.inputs.tokenizer_checks import tokenizer_assumptions
from hybrid3d.ledger import RankStart
from hybrid3d.planning.hardware import total_memory
from hybrid3d.run.folder import RunFolder, checkpoint_folder, draw_curves
from hybrid3d.run.identity import RunIdentity
from hybrid3d.run.identity import begin as begin_run
from hybrid3d.run.logger import Display, RunLogger
from hybrid3d.run.oom_recovery import OomRecovery, find_out_of_memory
from hybrid3d.scoring.code import sandbox
from hybrid3d.watch.heartbeat import enter_phase
from hybrid3d.workers.loop import WorkerServer, run_worker

if TYPE_CHECKING:
    from hybrid3d.run.health import Guard
    from hybrid3d.run.live_settings import LiveSettings
    from hybrid3d.train.trained_model import TrainedModels
    from hybrid3d.trainer.checkpoints import Checkpoints
    from hybrid3d.trainer.trainer import Trainer

logger = logging.getLogger(__name__)


def train(recipe: Recipe, folder: RunFolder, start: RankStart) -> None:
    """Train to the last step, resuming from the last checkpoint in the folder if there is one."""
    rank = start.rank
    if rank not in recipe.role_ranks["train"]:
        return run_worker(recipe, start)
    slots = _slots(recipe, folder, start) if recipe.algorithm.generates and not recipe.is_split else ()
    group = start_training(recipe, start)
    from hybrid3d.run.live_settings import LiveSettings
    from hybrid3d.train.megatron.runtime import in_use

    if rank == 0:
        folder.create(recipe)
        begin_run(folder)
        folder.add_event("kernels", in_use=in_use())
        logger.info("%s", in_use())
    recovery = distributed.broadcast_object(OomRecovery.from_folder(folder), group)
    with Display(recipe.name, recipe.run.steps, start.console) as display:
        record = RunLogger(folder, rank, display)
        if recipe.reward.name == "code" and recipe.scoring_role == "generation" and not recipe.is_split:
            confined_by = sandbox.protection() if rank == 0 else ""
            record.event("sandbox", sandbox.warning(confined_by), confined_by=confined_by)
        if rank == 0:
            for sentence in tokenizer_assumptions(Path(recipe.model.path), read_tokenizer(recipe)):
                record.event("tokenizer_assumed", f"{recipe.model.path}: {sentence}", what=sentence)
        live = LiveSettings(recipe, record, recovery.settings, group)
        loop = _train_rl if recipe.algorithm.generates else _train_on_data
        try:
            with record.tracking(recipe):
                loop(live, record, start, group, slots)
        except RuntimeError as error:
            cause = find_out_of_memory(error)
            if cause is None:
                raise
            raise recovery.prepare_restart(cause, live.recipe, folder, rank) from error
    if rank == 0:
        draw_curves(folder)
        folder.add_event("end", step=live.recipe.run.steps)


def evaluate(recipe: Recipe, folder: RunFolder, step: int, as_json: bool, start: RankStart) -> None:
    """Print what an evaluation of a checkpoint measures, from vLLM's answers with the checkpoint's weights."""
    rank, console = start.rank, start.console
    if rank not in recipe.role_ranks["train"]:
        return run_worker(recipe, start)

    slots = () if recipe.is_split else _slots(recipe, folder, start)
    group = start_training(recipe, start)
    messages = None if as_json else console
    record = RunLogger(folder, rank, Display(recipe.name, recipe.run.steps, messages), keeps_events=False)
    trainer = _make_trainer(recipe, start, group, slots, record, weights_of=checkpoint_folder(folder, step))
    enter_phase("eval")
    trainer.sync(step, recipe)
    if messages is not None:
        for line in format_files(trainer.held_out):
            messages.print(line, highlight=False, markup=False, soft_wrap=True)
    result = trainer.evaluate(step, recipe)
    if console is not None:
        for line in format_result(result, step, as_json):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    trainer.close(recipe)


def replay(
    recipe: Recipe,
    folder: RunFolder,
    overrides: Sequence[str],
    start: int,
    step: int,
    as_json: bool,
    this: RankStart,
) -> bool:
    """Do the recorded steps from `start` to `step` again, print the result, and return whether it is as recorded."""
    rank, console = this.rank, this.console
    group = start_training(recipe, this)
    from hybrid3d.trainer.replay import print_replay
    from hybrid3d.trainer.replay import replay as replay_steps

    enter_phase("replay")
    messages = None if as_json else console
    record = RunLogger(folder, rank, Display(recipe.name, recipe.run.steps, messages), keeps_events=False)
    start = distributed.broadcast_object(start, group)  # a run that goes on may have written a checkpoint meanwhile
    report = replay_steps(recipe, overrides, start, step, record, group)
    if report is not None:
        result = report.as_json()
        folder.write_replay(step, result)
        if console is not None and as_json:
            console.print(json.dumps(result, indent=2), highlight=False, markup=False, soft_wrap=True)
        elif console is not None:
            print_replay(result, console)
    return bool(distributed.broadcast_object(report is None or report.as_recorded, group))


def _slots(recipe: Recipe, folder: RunFolder, start: RankStart) -> Sequence[int]:
    # It imports the engines: while the launcher asks them, and vLLM first, which sets what Inductor reads at import
    from hybrid3d.planning import engine_queries  # noqa: F401
    from hybrid3d.planning.agreed_placement import choose_placement

    return choose_placement(recipe, start.store, folder.path, start.progress.restart_count)


def start_training(recipe: Recipe, start: RankStart) -> dist.ProcessGroup:
    """Create the default process group of the ranks that train, and Megatron's, with the memory that they take."""
    from hybrid3d.train.megatron import runtime

    group = distributed.start_among(recipe.role_ranks["train"], f"train/{start.progress.restart_count}", start.store)
    runtime.initialize(recipe.train, recipe.run.seed)
    config = read_config(recipe.model.path)
    runtime.use_groups(recipe.train, family_of(config).experts(config) is not None)
    return group


def _make_trainer(
    recipe: Recipe,
    start: RankStart,
    group: dist.ProcessGroup,
    slots: Sequence[int],
    record: RunLogger,
    guard: Guard | None = None,
    weights_of: Path | None = None,
) -> Trainer:
    """Build the engines of a rank that trains. Arguments are as for `Trainer` and its generator."""
    from hybrid3d.trainer.trainer import MakeGenerator, Trainer

    workers, attempt = None, start.progress.restart_count
    if group.rank() == 0 and (recipe.is_split or recipe.has_workers):
        workers = WorkerServer(recipe, start.store, record, attempt)
    make: MakeGenerator
    if recipe.is_split:
        from hybrid3d.trainer.remote_generator import RemoteGenerator

        make = partial(RemoteGenerator, recipe=recipe, group=group, store=start.store, workers=workers)
    else:
        from hybrid3d.trainer.local_generator import LocalGenerator

        make = partial(LocalGenerator, recipe=recipe, group=group, slots=slots, workers=workers, start=attempt)
    return Trainer(recipe, group, make, guard, weights_of, workers)


def _train_rl(
    live: LiveSettings, record: RunLogger, start: RankStart, group: dist.ProcessGroup, slots: Sequence[int]
) -> None:
    from hybrid3d.run.health import Guard
    from hybrid3d.trainer.rl import train_rl
    from hybrid3d.trainer.step_log import StepLog
    from hybrid3d.trainer.step_recorder import StepRecorder

    guard, recipe = Guard(record), live.recipe
    trainer = _make_trainer(recipe, start, group, slots, record, guard)
    models = trainer.models
    assert models is not None, "with a guard it trains"
    record.data({"train": trainer.train, **trainer.held_out})
    checkpoints = _make_checkpoints(live, models.trained, record, group)
    recorder = StepRecorder(models, record.folder, group, checkpoints.identity)
    train_rl(trainer, live, checkpoints, StepLog(trainer, record, recorder, guard, group))


def _train_on_data(
    live: LiveSettings, record: RunLogger, start: RankStart, group: dist.ProcessGroup, slots: Sequence[int]
) -> None:
    from hybrid3d.run.health import Guard
    from hybrid3d.train.megatron.policy import Policy
    from hybrid3d.trainer.data_loops import DataUpdates, DpoUpdates, SftUpdates, train_on_data
    from hybrid3d.trainer.models import reference_of

    guard, recipe, rank = Guard(record), live.recipe, group.rank()
    policy = Policy(read_config(recipe.model.path), recipe, rank)
    updates: DataUpdates
    if recipe.algorithm.uses_pairs:
        uses_reference = recipe.algorithm.uses_reference
        updates = DpoUpdates(recipe, policy, reference_of(recipe, policy, rank) if uses_reference else None)
    else:
        updates = SftUpdates(recipe, policy)
    checkpoints = _make_checkpoints(live, {"policy": policy}, record, group)
    train_on_data(updates, policy, live, guard, checkpoints, record, group)


def _make_checkpoints(
    live: LiveSettings, models: TrainedModels, record: RunLogger, group: dist.ProcessGroup
) -> Checkpoints:
    from hybrid3d.trainer.checkpoints import Checkpoints

    identity = RunIdentity.of_run(record.folder, live.initial_recipe) if group.rank() == 0 else None
    return Checkpoints(models, record, group, identity, _decide_sharding(live.recipe, models, record, group))


def training_ranks_here(recipe: Recipe) -> int:
    """Return the number of ranks that train on this node, of which this process is one; the first ranks train."""
    first = launch_environment.rank() - launch_environment.local_rank()
    return min(launch_environment.local_world_size(), recipe.train_ranks - first)


def _decide_sharding(recipe: Recipe, models: TrainedModels, record: RunLogger, group: dist.ProcessGroup) -> str:
    """Return how checkpoints save optimizers, by the memory of the nodes that the run is on; the same on all ranks.

    Raises:
        RecipeError: `dp_reshardable` is set, and ranks have no part of a bucket.
    """
    from hybrid3d.planning.memory import choose_sharding
    from hybrid3d.train.megatron.checkpoint import DP_RESHARDABLE, FULLY_RESHARDABLE, can_shard_by_ranks, host_bytes

    gathered, capacity = host_bytes(models, FULLY_RESHARDABLE), total_memory()
    ranks = training_ranks_here(recipe)
    votes = distributed.gather_objects(
        (choose_sharding(recipe.run.optimizer_sharding, ranks * gathered, capacity), ranks * gathered, capacity), group
    )
    sharding: str
    sharding, needed, memory = next((vote for vote in votes if vote[0] == DP_RESHARDABLE), votes[0])
    if sharding == DP_RESHARDABLE and not can_shard_by_ranks(models, group):
        problem = f"train.dp={recipe.train.dp}: of a bucket of gradients some ranks have no part, only padding"
        if recipe.run.optimizer_sharding != "auto":
            fix = "lower train.dp, or set run.optimizer_sharding=fully_reshardable"
            raise RecipeError(recipe.name, [f"run.optimizer_sharding={sharding}: {problem}: {fix}"])
        sharding = FULLY_RESHARDABLE
    message = ""
    if sharding == DP_RESHARDABLE and recipe.run.optimizer_sharding == "auto":
        message = (
            f"checkpoints save each rank's shard of the optimizer (dp_reshardable), as gathered they would take "
            f"{needed / 1e9:.0f} GB of a node's {memory / 1e9:.0f} GB: only train.dp can differ where they are loaded"
        )
    record.event("optimizer_sharding", message, sharding=sharding, gathered_bytes=needed, node_bytes=memory)
    return sharding
