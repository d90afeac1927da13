"""The tasks of a rank: what it does for each command once the ranks have met."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist
from rich.console import Console
from torch.distributed.distributed_c10d import PrefixStore, Store

from hybrid3d import distributed
from hybrid3d.bench.scaling import write_model
from hybrid3d.config import Recipe
from hybrid3d.distributed import RoleGroups
from hybrid3d.families import Config, family_of
from hybrid3d.inputs.models import read_config, read_tokenizer
from hybrid3d.inputs.tokenizer_files import tokenizer_assumptions
from hybrid3d.launch.child import this_process
from hybrid3d.launch.failures import failure_record, write_failure
from hybrid3d.run.folder import RunFolder, checkpoint_folder, draw_curves
from hybrid3d.run.identity import RunIdentity
from hybrid3d.run.identity import begin as begin_run
from hybrid3d.run.oom_recovery import OomRecovery, find_out_of_memory
from hybrid3d.scoring.code import sandbox
from hybrid3d.watch.heartbeat import enter_phase

if TYPE_CHECKING:
    from hybrid3d.run.health import Guard
    from hybrid3d.run.live_settings import LiveSettings
    from hybrid3d.run.logger import Record
    from hybrid3d.trainer.colocated import Colocated
    from hybrid3d.trainer.remote_generator import TrainingRank

logger = logging.getLogger(__name__)

GROUPS_SECONDS = 90.0  # within which all groups of a recipe are measured
GROUPS = "groups.json"  # in the run's folder: what was measured


def train(recipe: Recipe, folder: RunFolder, rank: int, store: Store, console: Console | None) -> None:
    """Train to the last step, resuming from the last checkpoint in the folder if there is one."""
    from hybrid3d.run.logger import Display

    if rank not in recipe.role_ranks["train"]:
        return _serve(recipe, store)
    slots = choose_placement(recipe, store, folder) if recipe.algorithm.generates and not recipe.is_split else ()
    group = _start_training(recipe, store)
    from hybrid3d.run.live_settings import LiveSettings
    from hybrid3d.run.logger import Record
    from hybrid3d.train.megatron.runtime import in_use

    if rank == 0:
        folder.create(recipe)
        begin_run(folder)
        folder.add_event("kernels", in_use=in_use())
        logger.info("%s", in_use())
    recovery = distributed.broadcast_object(OomRecovery.from_folder(folder), group)
    with Display(recipe.name, recipe.run.steps, console) as display:
        record = Record(folder, rank, display)
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
                loop(live, record, store, group, slots)
        except RuntimeError as error:
            cause = find_out_of_memory(error)
            if cause is None:
                raise
            raise recovery.prepare_restart(cause, live.recipe, folder, rank) from error
    if rank == 0:
        draw_curves(folder)
        folder.add_event("end", step=live.recipe.run.steps)


def _serve(recipe: Recipe, store: Store) -> None:
    """Generate, or compute rewards, for the ranks that train, to the end of their run."""
    from hybrid3d.workers.loop import MakeRank, Service

    make_rank: MakeRank
    if distributed.rank() in recipe.role_ranks["generation"]:
        from hybrid3d.workers.generation import GenerationRank

        make_rank = GenerationRank
        advice = "this rank only generates: lower rollout.gpu_memory_utilization"
    else:
        from hybrid3d.workers.reward import RewardRank

        make_rank = RewardRank
        advice = "this rank only computes rewards: raise roles.reward.tp or roles.reward.pp"
    try:
        Service(recipe, store, this_process(), make_rank).run()
    except RuntimeError as error:
        cause = find_out_of_memory(error)
        if cause is None:
            raise
        raise RuntimeError(f"{cause}: {advice}") from error


def _start_training(recipe: Recipe, store: Store) -> dist.ProcessGroup:
    """Create the default process group of the ranks that train, and Megatron's, with the memory that they take."""
    from hybrid3d.train.megatron import runtime

    group = distributed.start_among(recipe.role_ranks["train"], f"train/{this_process().restart_count}", store)
    runtime.initialize(recipe.train, recipe.run.seed)
    config = read_config(recipe.model.path)
    runtime.use_groups(recipe.train, family_of(config).experts(config) is not None)
    return group


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


def _make_roles(
    recipe: Recipe,
    store: Store,
    group: dist.ProcessGroup,
    slots: Sequence[int],
    record: Record,
    guard: Guard | None = None,
    weights_of: Path | None = None,
) -> Colocated | TrainingRank:
    """Build the engines of a rank that trains. Arguments are as for `Colocated` and `TrainingRank`."""
    if recipe.is_split:
        from hybrid3d.trainer.remote_generator import TrainingRank

        return TrainingRank(recipe, store, group, record, guard, weights_of, this_process().restart_count)
    from hybrid3d.trainer.colocated import Colocated

    others, start = None, this_process().restart_count
    if recipe.has_serving_ranks and group.rank() == 0:
        from hybrid3d.workers.roles import OtherRoles

        others = OtherRoles(recipe, store, record, start)
    return Colocated(recipe, group, slots, guard, weights_of, others, start)


def _train_rl(live: LiveSettings, record: Record, store: Store, group: dist.ProcessGroup, slots: Sequence[int]) -> None:
    from hybrid3d.launch.optimizer_sharding import decide_sharding
    from hybrid3d.run.health import Guard
    from hybrid3d.trainer.checkpoints import Checkpoints
    from hybrid3d.trainer.rl import train_rl
    from hybrid3d.trainer.step_recorder import StepRecorder

    guard, recipe = Guard(record), live.recipe
    roles = _make_roles(recipe, store, group, slots, record, guard)
    models = roles.models
    assert models is not None, "with a guard the roles train"
    record.data({"train": roles.train, **roles.held_out})
    identity = _identity(live, record, group)
    sharding = decide_sharding(recipe, models.trained, record, group)
    checkpoints = Checkpoints(models.trained, recipe.train.dp * recipe.train.cp, record, group, identity, sharding)
    recorder = StepRecorder(models.trained, models.policy.is_reporting_rank, record.folder, group, identity)
    train_rl(roles, live, guard, checkpoints, recorder, record, group)


def _train_on_data(
    live: LiveSettings, record: Record, store: Store, group: dist.ProcessGroup, slots: Sequence[int]
) -> None:
    from hybrid3d.launch.optimizer_sharding import decide_sharding
    from hybrid3d.run.health import Guard
    from hybrid3d.train.megatron.policy import Policy
    from hybrid3d.trainer.checkpoints import Checkpoints
    from hybrid3d.trainer.data_loops import DataUpdates, DpoUpdates, SftUpdates, train_on_data

    guard, recipe = Guard(record), live.recipe
    policy = Policy(read_config(recipe.model.path), recipe, group.rank())
    pairs = recipe.algorithm.uses_pairs
    updates: DataUpdates = DpoUpdates(recipe, policy, group.rank()) if pairs else SftUpdates(recipe, policy)
    replicas, identity = recipe.train.dp * recipe.train.cp, _identity(live, record, group)
    sharding = decide_sharding(recipe, {"policy": policy}, record, group)
    checkpoints = Checkpoints({"policy": policy}, replicas, record, group, identity, sharding)
    train_on_data(updates, policy, live, guard, checkpoints, record, group)


def _identity(live: LiveSettings, record: Record, group: dist.ProcessGroup) -> RunIdentity | None:
    """Return the identity of a run on the first rank, which writes it, and None on the others."""
    return RunIdentity.of_run(record.folder, live.initial_recipe) if group.rank() == 0 else None


def choose_placement(recipe: Recipe, store: Store, folder: RunFolder) -> Sequence[int]:
    """Return the slot of each rank in the rollout layout; vLLM is imported only by ranks that generate."""
    from hybrid3d.planning.agreed_placement import broadcast_placement

    store = PrefixStore(f"start/{this_process().restart_count}", store)
    return broadcast_placement(recipe, store, folder.path)


def evaluate(
    recipe: Recipe, folder: RunFolder, step: int, as_json: bool, rank: int, store: Store, console: Console | None
) -> None:
    """Print what an evaluation of a checkpoint measures, from vLLM's answers with the checkpoint's weights."""
    if rank not in recipe.role_ranks["train"]:
        return _serve(recipe, store)
    from hybrid3d.run.logger import Display, Record

    slots = () if recipe.is_split else choose_placement(recipe, store, folder)
    group = _start_training(recipe, store)
    from hybrid3d.generation.evaluation import format_files, format_result

    messages = None if as_json else console
    record = Record(folder, rank, Display(recipe.name, recipe.run.steps, messages), keeps_events=False)
    roles = _make_roles(recipe, store, group, slots, record, weights_of=checkpoint_folder(folder, step))
    enter_phase("eval")
    roles.sync(step, recipe)
    if messages is not None:
        for line in format_files(roles.held_out):
            messages.print(line, highlight=False, markup=False, soft_wrap=True)
    result = roles.evaluate(step, recipe)
    if console is not None:
        for line in format_result(result, step, as_json):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    roles.close(recipe)


def export(
    recipe: Recipe,
    folder: RunFolder,
    step: int,
    out: Path,
    merged: bool,
    rank: int,
    store: Store,
    console: Console | None,
) -> None:
    """Write a checkpoint as a Hugging Face checkpoint; every rank writes the boxes that it holds.

    Args:
        merged: of a policy with adapters, write the model with them, and not the adapters in PEFT's format.
    """
    from hybrid3d.inputs.export import UNFINISHED, unfinished_folder
    from hybrid3d.launch.exports import write_adapters, write_export
    from hybrid3d.train.megatron import checkpoint, runtime
    from hybrid3d.train.megatron.policy import Policy

    group = distributed.start(store)
    runtime.initialize(recipe.train, recipe.run.seed)
    config, with_mtp = read_config(recipe.model.path), recipe.train.mtp_loss_coef > 0
    policy = Policy(config, recipe, rank, trainable=False, with_mtp=with_mtp)
    checkpoint.load_weights({"policy": policy}, checkpoint_folder(folder, step), group)
    enter_phase("export")
    from_launcher = os.environ.get(UNFINISHED)  # created by our own launcher, which removes it if a rank is killed
    with unfinished_folder(out) if rank == 0 and not from_launcher else nullcontext(from_launcher) as created:
        unfinished = Path(distributed.broadcast_object(str(created), group))
        carried: Sequence[str] = ()
        if recipe.lora is not None and not merged:
            entries = write_adapters(policy, recipe, unfinished, group)
        else:
            with policy.merged():
                entries, carried = write_export(policy, recipe.model.path, unfinished, group)
        if rank == 0:
            os.rename(unfinished, os.path.realpath(out))  # so that an interrupted export never looks like a checkpoint
    if console is not None:
        console.print(f"wrote {len(entries)} tensors to {out}", highlight=False, markup=False)
        if carried:
            message = f"{len(carried)} of them are untrained copies from {recipe.model.path}"
            console.print(message, highlight=False, markup=False)


def replay(
    recipe: Recipe,
    folder: RunFolder,
    overrides: Sequence[str],
    start: int,
    step: int,
    as_json: bool,
    rank: int,
    store: Store,
    console: Console | None,
) -> bool:
    """Do the recorded steps from `start` to `step` again, write and print the result.

    Returns:
        Whether the result is as recorded, on every rank.
    """
    group = _start_training(recipe, store)
    from hybrid3d.run.logger import Display, Record
    from hybrid3d.trainer.replay import print_replay
    from hybrid3d.trainer.replay import replay as replay_steps

    enter_phase("replay")
    messages = None if as_json else console
    record = Record(folder, rank, Display(recipe.name, recipe.run.steps, messages), keeps_events=False)
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


def bench(
    recipe: Recipe,
    config: Config,
    scaling: str,
    folder: RunFolder,
    repeats: int,
    changed: float | None,
    as_json: bool,
    rank: int,
    store: Store,
    console: Console | None,
) -> None:
    """Measure the sync of a model of this config, the method of other trainers, and the network itself.

    Args:
        scaling: describes how the model was scaled down.
        changed: also measure syncs of this fraction of all elements.
    """
    from hybrid3d.bench import report

    if rank == 0:
        write_model(recipe, config)
        store.set("model", "written")
    store.wait(["model"])
    slots = choose_placement(recipe, store, folder)
    groups = start_groups(recipe, store)
    from hybrid3d.bench.task import measure

    print_status = console.print if console is not None and not as_json else lambda message: None
    measurements = measure(recipe, repeats, groups, slots, changed, print_status)
    if rank == 0:
        numbers = report.summarize(recipe, scaling, measurements, changed)
        report.write_results(folder, numbers)
        if console is not None:
            text = json.dumps(numbers, indent=2) if as_json else report.format_table(numbers)
            console.print(text, highlight=False, markup=False, soft_wrap=True)


def measure_groups(recipe: Recipe, folder: RunFolder, rank: int, store: Store, console: Console | None) -> None:
    """Measure bandwidth and latency of each process group of a recipe, and write them to the folder.

    The process fails if it takes longer than `GROUPS_SECONDS`.
    """

    def give_up() -> None:
        reason = f"the process groups were not measured within {GROUPS_SECONDS:g} s"
        write_failure(folder.failure_path(rank), failure_record(rank, reason))
        os._exit(1)

    limit = threading.Timer(GROUPS_SECONDS, give_up)
    limit.daemon = True
    limit.start()
    groups = start_groups(recipe, store)
    from hybrid3d.bench.groups import measure

    measured = measure(recipe, groups)
    limit.cancel()
    if rank == 0:
        (folder.path / GROUPS).write_text(json.dumps([asdict(one) for one in measured]), encoding="utf-8")
