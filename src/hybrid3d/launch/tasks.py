"""What ranks do for each command, once they run."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console

from hybrid3d import distributed
from hybrid3d.bench.scaling import write_model
from hybrid3d.config import Recipe
from hybrid3d.families import Config
from hybrid3d.inputs.models import read_config
from hybrid3d.rewards import sandbox
from hybrid3d.run.heartbeat import enter_phase
from hybrid3d.run.oom_recovery import OomRecovery
from hybrid3d.run.run_folder import RunFolder, checkpoint_folder, draw_curves


def train(recipe: Recipe, folder: RunFolder, rank: int, store: dist.Store, console: Console | None) -> None:
    """Train to the end, resuming where the folder's last checkpoint stands."""
    from hybrid3d.run.display import Display
    from hybrid3d.train import runtime

    slots = _agree(recipe, store) if recipe.algorithm.generates else ()
    distributed.start(store)
    runtime.initialize(recipe.train, recipe.run.seed)
    from hybrid3d.run.live_settings import Control
    from hybrid3d.run.record import Record
    from hybrid3d.train.kernels import in_use
    from hybrid3d.trainer import loops

    if rank == 0:
        folder.create(recipe)
        folder.add_event("kernels", in_use=in_use())
        print(in_use(), flush=True)  # to this rank's log
    relief = distributed.broadcast_object(OomRecovery.of(folder))
    with Display(recipe.name, recipe.run.steps, console) as display:
        record = Record(folder, rank, display)
        if rank == 0 and recipe.reward.name == "code":
            confined_by = sandbox.protection()
            record.event("sandbox", sandbox.warning(confined_by), confined_by=confined_by)
        control = Control(recipe, record, relief.settings)
        try:
            if recipe.algorithm.generates:
                loops.train_rl(control, record, rank, slots)
            else:
                loops.train_sft(control, record, rank)
        except torch.OutOfMemoryError as error:
            raise relief.after(error, control.recipe, folder, rank) from error
    if rank == 0:
        draw_curves(folder)
        folder.add_event("end", step=control.recipe.run.steps)


def _agree(recipe: Recipe, store: dist.Store) -> Sequence[int]:
    """Where each rank generates; vLLM is imported only by those that do."""
    from hybrid3d.planning.agreed_placement import agree

    return agree(recipe, store)


def evaluate(
    recipe: Recipe, folder: RunFolder, step: int, rank: int, store: dist.Store, console: Console | None
) -> None:
    """Held-out accuracy of a checkpoint: greedy answers of vLLM with the checkpoint's weights."""
    from hybrid3d.train import runtime

    slots = _agree(recipe, store)
    distributed.start(store)
    runtime.initialize(recipe.train, recipe.run.seed)
    from hybrid3d.roles.colocated import Colocated

    run = Colocated(recipe, rank, slots, weights_of=checkpoint_folder(folder, step))
    enter_phase("eval")
    run.sync.run(step)
    if console is not None:
        console.print(f"data.eval {run.rollouts.held_out}", highlight=False, markup=False, soft_wrap=True)
    found = run.rollouts.evaluate(step)
    if console is not None:
        problems, failed = len(run.rollouts.held_out.examples), sum(found.failures.values())
        console.print(f"step {step}: held-out accuracy {found.accuracy:.4f} of {problems} problems", highlight=False)
        if failed:
            said = f"{failed} rewards failed, such as: {next(iter(found.examples.values()))}"
            console.print(said, highlight=False, markup=False, soft_wrap=True)
    run.close()


def export(
    recipe: Recipe, folder: RunFolder, step: int, out: Path, rank: int, store: dist.Store, console: Console | None
) -> None:
    """Write a checkpoint as Hugging Face files; every rank writes the boxes that it holds."""
    from hybrid3d.inputs.export import UNFINISHED, copy_companions, export_entries, is_untrained, unfinished_folder
    from hybrid3d.reshard.files import carry_files, create_files, export_files
    from hybrid3d.train import checkpoint, runtime
    from hybrid3d.train.policy import Policy

    distributed.start(store)
    runtime.initialize(recipe.train, recipe.run.seed)
    policy = Policy(read_config(recipe.model.path), recipe, rank, trainable=False)
    checkpoint.load_weights({"policy": policy}, checkpoint_folder(folder, step))
    enter_phase("export")
    entries = export_entries(recipe.model.path, policy.config)
    carried = [name for name in entries if is_untrained(name, policy.config)]
    launched = os.environ.get(UNFINISHED)  # our own launcher has made it, and removes it where a rank is killed
    with unfinished_folder(out) if rank == 0 and not launched else nullcontext(launched) as made:
        unfinished = Path(distributed.broadcast_object(str(made)))
        if rank == 0:
            create_files(unfinished, entries)
            copy_companions(recipe.model.path, unfinished)
        dist.barrier()
        holdings = dict(enumerate(distributed.gather(policy.weights.holdings)))
        export_files(unfinished, entries, holdings, policy.weights.tensors, rank, carried)
        if rank == 0:
            carry_files(recipe.model.path, unfinished, entries, carried)
        dist.barrier()
        if rank == 0:
            os.rename(unfinished, os.path.realpath(out))  # an export that was interrupted never looks like a checkpoint
    if console is not None:
        console.print(f"wrote {len(entries)} tensors to {out}", highlight=False, markup=False)
        if carried:
            said = f"{len(carried)} of them are untrained, as they were in {recipe.model.path}"
            console.print(said, highlight=False, markup=False)


def bench(
    recipe: Recipe,
    config: Config,
    said: str,
    folder: RunFolder,
    repeats: int,
    as_json: bool,
    rank: int,
    store: dist.Store,
    console: Console | None,
) -> None:
    """Measure the sync of a model of this config beside the others' way and the wire.

    Args:
        said: what was scaled down.
    """
    from hybrid3d.bench import report
    from hybrid3d.train import runtime

    if rank == 0:
        write_model(recipe, config)
        store.set("model", "written")
    store.wait(["model"])
    slots = _agree(recipe, store)
    distributed.start(store)
    runtime.initialize(recipe.train, recipe.run.seed)
    from hybrid3d.bench.task import measure

    say = console.print if console is not None and not as_json else lambda what: None
    found = measure(recipe, repeats, rank, slots, say)
    if rank == 0:
        numbers = report.numbers(recipe, said, found)
        report.write(folder, numbers)
        if console is not None:
            text = json.dumps(numbers, indent=2) if as_json else report.table(numbers)
            console.print(text, highlight=False, markup=False, soft_wrap=True)
