"""Checkpoints by Megatron's `dist_checkpointing`: every rank writes its shards, any rank count reads them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing

from hybrid3d.train import manifest
from hybrid3d.train.policy import Policy
from hybrid3d.train.runtime import on_device
from hybrid3d.train.weights import METADATA

PROGRESS = "progress.json"

# The one format of the distributed optimizer that every layout can be loaded from
OPTIMIZER_METADATA = {
    **METADATA,
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
}


def save(policy: Policy, folder: Path, progress: Mapping[str, Any]) -> None:
    """Write the policy, its optimizer and its schedule; the folder appears under its name when it is complete.

    Args:
        progress: what else a run must know to go on, as JSON.
    """
    partial = folder.with_name(folder.name + ".partial")
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    with on_device():
        dist_checkpointing.save(_state(policy, is_loading=False), str(partial))
    if dist.get_rank() == 0:
        (partial / PROGRESS).write_text(json.dumps(dict(progress)))
    dist.barrier()
    shares: list[dict[str, int]] = [{}] * dist.get_world_size()
    mine = manifest.names_in(partial)[dist.get_rank() :: dist.get_world_size()]
    dist.all_gather_object(shares, {name: manifest.crc_of(partial / name) for name in mine})
    if dist.get_rank() == 0:
        manifest.write(partial, {name: crc for share in shares for name, crc in share.items()})
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(partial, folder)
        manifest.sync_folder(folder.parent)
    dist.barrier()


def load(policy: Policy, folder: Path) -> dict[str, Any]:
    """Bring the policy, its optimizer and its schedule to where they were when `folder` was saved.

    Returns:
        The progress that was saved with them.
    """
    with on_device():
        _make_optimizer_state(policy)
        state = dist_checkpointing.load(_state(policy, is_loading=True), str(folder))
        _load_model(policy, state)
        # Experts that are parallel have an optimizer of their own, which another layout may lack: what the
        # optimizers have in common then comes from the first.
        common = {key: value for key, value in state["optimizer0"].items() if key != "param_state"}
        for number, optimizer in enumerate(policy.optimizer.chained_optimizers):
            optimizer.load_state_dict({**common, **state[f"optimizer{number}"]})
        _own_step_counts(policy)
        policy.scheduler.load_state_dict(state["scheduler"])
    progress: dict[str, Any] = json.loads((folder / PROGRESS).read_text())
    return progress


def load_weights(policy: Policy, folder: Path) -> None:
    """Bring only the weights: for a policy that is not trained."""
    with on_device():
        _load_model(policy, dist_checkpointing.load(_model_state(policy), str(folder)))


def _model_state(policy: Policy) -> dict[str, Any]:
    return {f"model{n}": s.sharded_state_dict(metadata=dict(METADATA)) for n, s in enumerate(policy.stages)}


def _state(policy: Policy, is_loading: bool) -> dict[str, Any]:
    model = _model_state(policy)
    shards = model["model0"] if len(model) == 1 else model
    settings: dict[str, Any] = dict(is_loading=is_loading, metadata=dict(OPTIMIZER_METADATA))
    optimizers = {}  # one by one: together, Megatron names their state after their number, which depends on the layout
    for number, optimizer in enumerate(policy.optimizer.chained_optimizers):
        with _without_padding(optimizer):
            optimizers[f"optimizer{number}"] = optimizer.sharded_state_dict(shards, **settings)
    return {**model, **optimizers, "scheduler": policy.scheduler.state_dict()}


@contextmanager
def _without_padding(optimizer: Any) -> Iterator[None]:
    """Have each parameter's place in a buffer not count what pads the buckets before its own.

    Megatron's distributed optimizer gathers its state without that padding, but looks the parameters up with it: of
    buckets that need padding it would save all but the first shifted.
    """
    kept = [buffer.param_index_map for buffer in optimizer.buffers]
    for buffer in optimizer.buffers:
        padding, before = [], 0
        for bucket in buffer.buckets:
            padding.append(before)
            before += bucket.grad_data.numel() - bucket.numel_unpadded
        buffer.param_index_map = {
            param: (start - padding[number], end - padding[number], number)
            for param, (start, end, number) in buffer.param_index_map.items()
        }
    try:
        yield
    finally:
        for buffer, places in zip(optimizer.buffers, kept, strict=True):
            buffer.param_index_map = places


def _make_optimizer_state(policy: Policy) -> None:
    """Torch's Adam has no state before its first step, and Megatron asks it for its step count to say what to load."""
    for optimizer in policy.optimizer.chained_optimizers:
        if not optimizer.optimizer.state:
            optimizer._init_optimizer_states_with_dummy_values()


def _own_step_counts(policy: Policy) -> None:
    """Give each parameter's Adam state its own step count: Megatron loads one tensor into all of them."""
    for optimizer in policy.optimizer.chained_optimizers:
        for state in optimizer.optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].clone()


def _load_model(policy: Policy, state: dict[str, Any]) -> None:
    for number, stage in enumerate(policy.stages):
        stage.load_state_dict(state[f"model{number}"])
