"""Checkpoints by Megatron's `dist_checkpointing`: every rank writes its shards, any rank count reads them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject, is_main_replica
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.optimizer.optimizer import param_group_identifier_keys
from torch.distributed.checkpoint.api import CheckpointException

from hybrid3d.distributed import gather_objects
from hybrid3d.storage import manifest
from hybrid3d.storage.manifest import PROGRESS, BrokenCheckpoint, Identity, UnusableCheckpoint
from hybrid3d.train.megatron.model import MegatronModel
from hybrid3d.train.megatron.runtime import on_device
from hybrid3d.train.megatron.source import ADAPTERS, METADATA
from hybrid3d.train.megatron.versions import COMMON_FILE, WRITTEN_BY
from hybrid3d.train.trained_model import TrainedModels
from hybrid3d.train.writing import CheckpointWriter

# The one format of optimizers that every layout can be loaded from, and one without gathered copies
FULLY_RESHARDABLE, DP_RESHARDABLE = "fully_reshardable", "dp_reshardable"
OPTIMIZER_BYTES = 12  # of an element: Adam's two moments and the main weight, in float32
EXPERTS = "is_expert_parallel"  # one of the keys by which Megatron distinguishes parameter groups
KINDS = ("wd_mult", "lr_mult", "is_decoupled_lr")  # those of them that no setting changes

OPTIMIZER = "optimizer.json"  # in a checkpoint: the format, and the layout that wrote it
MODEL_AXES = ("tp", "pp", "vpp", "ep", "etp")  # which `dp_reshardable` cannot change


def begin(
    models: TrainedModels,
    folder: Path,
    progress: Mapping[str, Any],
    group: dist.ProcessGroup,
    in_background: bool = False,
    identity: Identity | None = None,
    sharding: str = FULLY_RESHARDABLE,
) -> CheckpointWriter:
    """Start writing models, their optimizers and schedules; the returned `CheckpointWriter` finishes the checkpoint.

    The other arguments are those of `CheckpointWriter`.

    Args:
        progress: the rest of the run's state, as JSON.
        sharding: how optimizers are saved. `fully_reshardable`: any layout can load them, and each rank makes those of
            its whole data-parallel group in host memory. `dp_reshardable`: each rank writes its own shard.
    """
    own = _own(models)
    with on_device():
        for model in own.values():
            model.onload("parameters", "optimizer")
            _make_optimizer_state(model)
    state = partial(_combine_states, own, partial(_state, is_loading=False, sharding=sharding))
    documents = {PROGRESS: dict(progress), OPTIMIZER: {"sharding": sharding, "layout": _layout(own)}}
    return CheckpointWriter(state, folder, documents, in_background, group, identity)


def _own(models: TrainedModels) -> dict[str, MegatronModel]:
    """Return the models as those of Megatron, which all of them are."""
    found = {name: model for name, model in models.items() if isinstance(model, MegatronModel)}
    assert found.keys() == models.keys(), "checkpoints are of models in the train layout"
    return found


def _layout(models: Mapping[str, MegatronModel]) -> dict[str, int]:
    """Return the sizes of the train layout's axes."""
    return {
        "tp": parallel_state.get_tensor_model_parallel_world_size(),
        "pp": parallel_state.get_pipeline_model_parallel_world_size(),
        "vpp": max(len(model.stages) for model in models.values()),
        "ep": parallel_state.get_expert_model_parallel_world_size(),
        "etp": parallel_state.get_expert_tensor_parallel_world_size(),
        "cp": parallel_state.get_context_parallel_world_size(),
        "dp": parallel_state.get_data_parallel_world_size(),
    }


def can_shard_by_ranks(models: TrainedModels, group: dist.ProcessGroup) -> bool:
    """Return whether each rank has a part of each bucket, as `dp_reshardable` requires; the same on every rank.

    A small bucket on many data-parallel ranks leaves some of them with nothing but padding.
    """
    optimizers = [optimizer for model in _own(models).values() for _, optimizer in _optimizers(model)]
    is_empty = any(
        not bucket["param_map"]
        for optimizer in optimizers
        for buffer in optimizer.gbuf_ranges
        for buckets in buffer.values()
        for bucket in buckets
    )
    return not any(gather_objects(is_empty, group))


def host_bytes(models: TrainedModels, sharding: str) -> int:
    """Return the bytes of optimizer state that saving makes in this rank's host memory, beside what is there."""
    tensors = [tensor for model in _own(models).values() for tensor in model.trained_weights.tensors.values()]
    return sum(tensor.numel() for tensor in tensors) * OPTIMIZER_BYTES if sharding == FULLY_RESHARDABLE else 0


def bytes_expected(models: TrainedModels, group: dist.ProcessGroup) -> int:
    """Estimate the bytes of a checkpoint: weights, and Adam's moments and main weights in float32.

    Each shard counts once, on the rank that writes it: experts have other replicas than the rest of a model.
    """
    with on_device():
        for model in models.values():
            model.onload("parameters")
        stages = [shards for model in _own(models).values() for shards in _weights(model).values()]
    shards = [shard for of_stage in stages for shard in of_stage.values() if not isinstance(shard, ShardedObject)]
    written = [shard.data for shard in shards if is_main_replica(shard.replica_id)]
    local = torch.tensor(sum(t.numel() * (t.element_size() + OPTIMIZER_BYTES) for t in written))
    dist.all_reduce(local, group=group)
    return int(local)


class CheckpointUnloadable(RuntimeError):
    """An intact checkpoint that Megatron cannot load; the message has its path and Megatron's error."""


def check(folder: Path, group: dist.ProcessGroup) -> None:
    """Check a checkpoint's files against its manifest; each rank reads its share.

    Raises:
        BrokenCheckpoint: on every rank, with the first problem found and both numbers; an `UnusableCheckpoint` if the
            files are not damaged.
    """
    problem = None
    try:
        if group.rank() == 0:
            manifest.check_sizes(folder)
            _check_version(folder)
        manifest.check(folder, group.rank(), group.size())
    except BrokenCheckpoint as error:
        problem = type(error), str(error)
    for kind, message in filter(None, gather_objects(problem, group)):
        raise kind(message, raised_on_all_ranks=True)


def _check_version(folder: Path) -> None:
    """Check that the version of Megatron-Core that is installed reads what another may have written."""
    if not COMMON_FILE or COMMON_FILE in manifest.read_manifest(folder):
        return
    here, wrote = WRITTEN_BY["megatron-core"], manifest.read_versions(folder).get("megatron-core")
    lacks = f"{folder}: {manifest.MANIFEST} does not list {COMMON_FILE}"
    if wrote in (None, here):
        raise BrokenCheckpoint(f"{lacks}, which every checkpoint of megatron-core {here} has")
    raise UnusableCheckpoint(
        f"{lacks}: megatron-core {wrote} wrote it, and {here}, which is installed, cannot read it: install "
        f"megatron-core {wrote}"
    )


@contextmanager
def _naming_checkpoint(folder: Path) -> Iterator[None]:
    """Convert PyTorch's error, which is not an `Exception`, into a `CheckpointUnloadable` with the path."""
    try:
        yield
    except CheckpointException as error:
        failure = next(iter(error.failures.values()))[0]
        raise CheckpointUnloadable(f"{folder} cannot be loaded: {type(failure).__name__}: {failure}") from error


def load(models: TrainedModels, folder: Path, group: dist.ProcessGroup) -> dict[str, Any]:
    """Load models, their optimizers and schedules from a checkpoint; return the progress that was saved with them.

    Raises:
        BrokenCheckpoint: on every rank, before anything is changed: the files differ from what was written.
        CheckpointUnloadable: the files are intact, but Megatron cannot load them into these models.
    """
    own = _own(models)
    check(folder, group)
    sharding = _check_sharding(own, folder)
    with on_device(), _naming_checkpoint(folder):
        for model in own.values():
            model.onload()
            _make_optimizer_state(model)
        state_of = partial(_state, is_loading=True, sharding=sharding)
        states = dist_checkpointing.load(_combine_states(own, state_of), str(folder))
        for name, model in own.items():
            state = states[name]
            _load_model(model, state)
            # With expert parallelism experts have their own optimizer, which the layout that was saved, or rank 0,
            # may lack. What the optimizers have in common then comes from the first one.
            first = state[min(key for key in state if key.startswith("optimizer"))]
            common = {key: value for key, value in first.items() if key != "param_state"}
            parts = [part for key, part in state.items() if key.startswith("optimizer") and "optimizer" in part]
            saved = [group for part in parts for group in part["optimizer"]["param_groups"]]
            for key, optimizer in _optimizers(model):
                full = {**common, **state[key]}
                full["optimizer"] = {**full["optimizer"], "param_groups": _settings_of(optimizer, saved)}
                with torch.no_grad():  # in float32 the main weights are views of parameters
                    optimizer.load_state_dict(full)
            _separate_step_counts(model)
            model.scheduler.load_state_dict(state["scheduler"])
    progress: dict[str, Any] = json.loads((folder / PROGRESS).read_text(encoding="utf-8"))
    return progress


def _check_sharding(models: Mapping[str, MegatronModel], folder: Path) -> str:
    """Return how optimizers are saved in a checkpoint; CheckpointUnloadable if it is by ranks of another layout."""
    path = folder / OPTIMIZER
    if not path.exists():  # of a version that knew one format
        return FULLY_RESHARDABLE
    saved = json.loads(path.read_text(encoding="utf-8"))
    here = _layout(models)
    differing = [axis for axis in MODEL_AXES if saved["layout"][axis] != here[axis]]
    if saved["sharding"] == DP_RESHARDABLE and differing:
        told = ", ".join(f"train.{axis}={here[axis]}, saved was {saved['layout'][axis]}" for axis in differing)
        fix = "load it in that layout, or write it with run.optimizer_sharding=fully_reshardable"
        raise CheckpointUnloadable(f"{folder}: optimizers saved as {DP_RESHARDABLE} fit one layout: {told}: {fix}")
    return str(saved["sharding"])


def load_weights(models: TrainedModels, folder: Path, group: dist.ProcessGroup) -> None:
    """Load only the weights of these models, without optimizers. Raises the errors of `load`."""
    own = _own(models)
    check(folder, group)
    with on_device(), _naming_checkpoint(folder):
        for model in own.values():
            model.onload("parameters")
        states = dist_checkpointing.load(_combine_states(own, _weights), str(folder))
        for name, model in own.items():
            _load_model(model, states[name])


def _combine_states(
    models: Mapping[str, MegatronModel], state_of: Callable[[MegatronModel], dict[str, Any]]
) -> dict[str, Any]:
    """Return each model's state by its name, and prefix the keys of its shards with that name."""
    states = {name: state_of(model) for name, model in models.items()}
    for name, state in states.items():
        add_prefix_for_sharding(state, f"{name}.")
    return states


def _weights(model: MegatronModel) -> dict[str, Any]:
    """Return the shards of each stage; of a model with adapters only these, as its own weights never change."""
    stages = [stage.sharded_state_dict(metadata=dict(METADATA)) for stage in model.stages]
    if model.adapters is not None:
        stages = [{k: v for k, v in shards.items() if k.startswith(f"{ADAPTERS}.")} for shards in stages]
    return {f"model{number}": shards for number, shards in enumerate(stages)}


def _state(model: MegatronModel, is_loading: bool, sharding: str) -> dict[str, Any]:
    weights = _weights(model)
    shards = weights["model0"] if len(weights) == 1 else weights
    metadata = {**METADATA, "distrib_optim_sharding_type": sharding}
    metadata["distrib_optim_fully_reshardable_mem_efficient"] = False
    settings: dict[str, Any] = dict(is_loading=is_loading, metadata=metadata)
    # Saved separately: together, Megatron names their state after their number, which depends on the layout
    optimizers = {}
    for key, optimizer in _optimizers(model):
        if sharding == DP_RESHARDABLE:
            optimizers[key] = optimizer.sharded_state_dict(shards, **settings)
            add_prefix_for_sharding(optimizers[key], f"{key}.")  # both would be called after their group's number
            continue
        with _without_padding(optimizer):
            optimizers[key] = optimizer.sharded_state_dict(shards, **settings)
    return {**weights, **optimizers, "scheduler": model.scheduler.state_dict()}


def _optimizers(model: MegatronModel) -> list[tuple[str, Any]]:
    """Return (name, optimizer) of optimizers with parameters; a stage without experts has one without any."""
    chained = enumerate(model.optimizer.chained_optimizers)
    return [(f"optimizer{number}", optimizer) for number, optimizer in chained if getattr(optimizer, "buffers", None)]


def _settings_of(optimizer: Any, saved: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the saved settings of an optimizer's parameter groups, saved with or without expert parallelism.

    The groups get the saved settings by which Megatron recognizes them: since 0.19 these are also learning rates, which
    may have changed since.
    """

    def kind(group: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(group[key] for key in KINDS)

    groups, by_kind = optimizer.optimizer.param_groups, {kind(group): group for group in saved}
    found = [{**by_kind[kind(group)], EXPERTS: group[EXPERTS]} for group in groups]
    for group, settings in zip(groups, found, strict=True):
        group.update({key: settings[key] for key in param_group_identifier_keys if key in settings})
    return found


@contextmanager
def _without_padding(optimizer: Any) -> Iterator[None]:
    """Compute each parameter's position in a buffer without the padding of earlier buckets.

    Megatron's distributed optimizer gathers its state without that padding, but looks the parameters up with it, so
    the state of every bucket after one with padding would be saved shifted.
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


def _make_optimizer_state(model: MegatronModel) -> None:
    """Create Adam's state, which does not exist before the first step, because Megatron saves and loads it.

    This takes a step that changes nothing: gradients and the learning rate, which scales weight decay too, are zero,
    and the step is not counted.
    """
    for optimizer in model.optimizer.chained_optimizers:
        adam = optimizer.optimizer
        if adam is None or adam.state:  # None without parameters, where only experts have adapters
            continue
        rates = [group["lr"] for group in adam.param_groups]
        for group in adam.param_groups:
            group["lr"] = 0.0
        optimizer._init_optimizer_states_with_dummy_values()
        for group, rate in zip(adam.param_groups, rates, strict=True):
            group["lr"] = rate
        # Transformer Engine and Apex count steps per parameter group
        for counter in (*adam.param_groups, *adam.state.values()):
            if "step" in counter:
                counter["step"] *= 0


def _separate_step_counts(model: MegatronModel) -> None:
    """Give each parameter's Adam state its own step count: Megatron loads one tensor into all of them."""
    for _, optimizer in _optimizers(model):
        for state in optimizer.optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].clone()


def _load_model(model: MegatronModel, state: dict[str, Any]) -> None:
    for number, stage in enumerate(model.stages):
        stage.load_state_dict(state[f"model{number}"], strict=model.adapters is None)
