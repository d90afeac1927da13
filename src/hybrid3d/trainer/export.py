"""The body of `hybrid3d export`: writes a policy's weights or adapters as files that transformers and PEFT read."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from hybrid3d import distributed
from hybrid3d.config import Recipe
from hybrid3d.families import family_of
from hybrid3d.inputs.adapters import ADAPTER_CONFIG, adapted_shapes, adapter_config, model_shapes
from hybrid3d.inputs.export import UNFINISHED, copy_config_and_tokenizer, export_entries, unfinished_folder
from hybrid3d.inputs.models import read_config
from hybrid3d.ledger import RankStart
from hybrid3d.reshard.file_index import ADAPTER_FILE, TensorEntry
from hybrid3d.reshard.files import copy_tensors, create_files, export_files
from hybrid3d.reshard.plan.layout import Holdings
from hybrid3d.run.folder import RunFolder, checkpoint_folder
from hybrid3d.watch.heartbeat import enter_phase

if TYPE_CHECKING:
    from hybrid3d.train.trained_model import PolicyModel


def export(
    recipe: Recipe,
    folder: RunFolder,
    step: int,
    out: Path,
    merged: bool,
    start: RankStart,
) -> None:
    """Write a checkpoint as a Hugging Face checkpoint, or adapters that are not `merged` in PEFT's format.

    Every rank writes the boxes that it holds.
    """
    from hybrid3d.train.megatron import checkpoint, runtime
    from hybrid3d.train.megatron.policy import Policy

    rank, console = start.rank, start.console
    group = distributed.start(start.store)
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


def write_export(
    policy: PolicyModel, source: str, out: Path, group: dist.ProcessGroup
) -> tuple[Mapping[str, TensorEntry], list[str]]:
    """Write the weights of a policy as a Hugging Face checkpoint into a folder; every rank writes the boxes it holds.

    Returns:
        The tensors of the export, and the names of those that are untrained copies from `source`, its first checkpoint.
    """
    config, family, own = policy.config, family_of(policy.config), policy.own_source()
    entries = export_entries(source, config)
    holdings = dict(enumerate(distributed.gather_objects(own.holdings, group)))
    written = {piece.name for held in holdings.values() for piece in held.pieces}
    if any(family.is_mtp(name, config) for name in written):
        copies = {copy: name for copy, name in family.mtp_copies(config).items() if copy in entries}
        holdings = {rank: _with_copies(held, copies) for rank, held in holdings.items()}
        written |= copies.keys()
    carried = [name for name in entries if family.is_mtp(name, config) and name not in written]
    if group.rank() == 0:
        create_files(out, entries)
        copy_config_and_tokenizer(source, out)
    dist.barrier(group)
    export_files(out, entries, holdings, own, group.rank(), carried)
    if group.rank() == 0:
        copy_tensors(source, out, entries, carried)
    dist.barrier(group)
    return entries, carried


def _with_copies(held: Holdings, copies: Mapping[str, str]) -> Holdings:
    """Return holdings in which tensors, the values of `copies`, are also pieces of their copies, the keys."""
    found = [replace(p, name=copy) for copy, name in copies.items() for p in held.pieces if p.name == name]
    return Holdings((*held.pieces, *found))


def write_adapters(
    policy: PolicyModel, recipe: Recipe, out: Path, group: dist.ProcessGroup
) -> Mapping[str, TensorEntry]:
    """Write a policy's adapters in PEFT's format into a folder; every rank writes the boxes it holds."""
    assert recipe.lora is not None, "called for a run with adapters"
    adapters = policy.trained_source()
    shapes = adapted_shapes(recipe.lora, model_shapes(recipe.model.path, policy.config))
    entries = {name: TensorEntry(ADAPTER_FILE, shape, recipe.model.dtype) for name, shape in shapes.items()}
    if group.rank() == 0:
        create_files(out, entries)
        config = adapter_config(recipe.lora, recipe.model.path, shapes)
        (out / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    dist.barrier(group)
    holdings = dict(enumerate(distributed.gather_objects(adapters.holdings, group)))
    export_files(out, entries, holdings, adapters, group.rank())
    dist.barrier(group)
    return entries
