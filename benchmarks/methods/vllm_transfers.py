"""The bytes that vLLM's own weight transfers `sharded_rdt` and `nccl_m2n` bring to the workers of a recipe's engines.

Neither runs on CPUs: the first needs Ray's actors on GPUs, the second NCCL's M2N. So vLLM's planning code of both is
called with its models on the meta device, and its plans are added up.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from hybrid3d.config import Recipe
from hybrid3d.reshard.plan.layout import Shape
from hybrid3d.rollout.probe import model_of_rank

from vllm.config import VllmConfig  # isort: skip
from vllm.config.weight_transfer import WeightTransferConfig  # isort: skip
from vllm.distributed.weight_transfer.base import layerwise_groups  # isort: skip
from vllm.distributed.weight_transfer.m2n_layout import resolve_parameter_destinations  # isort: skip
from vllm.distributed.weight_transfer.sharded_rdt_common import RdtRouter  # isort: skip
from vllm.distributed.weight_transfer.sharded_rdt_engine import (  # isort: skip
    ShardedRDTWeightTransferEngine,
    ShardedRDTWeightTransferInitInfo,
)


@dataclass(frozen=True)
class Received:
    """The bytes that all workers receive.

    Attributes:
        sharded_rdt: the slices that each worker's loader asks for.
        m2n: shards of the parameters that are mapped 1:1, and the other tensors whole, on every worker.
        m2n_mapped: of these, the shards.
    """

    sharded_rdt: int
    m2n: int
    m2n_mapped: int


def count_received(recipe: Recipe, shapes: Mapping[str, Shape]) -> Received:
    """Count the bytes that the workers of all engines of a recipe receive.

    Args:
        shapes: every tensor of the checkpoint and its full shape.
    """
    assert recipe.rollout is not None, "the script has checked it"
    slots = recipe.rollout.tp * recipe.rollout.dp
    found = []
    for slot in range(slots):
        with model_of_rank(recipe, slot) as (model, config):
            mapped, whole = count_m2n(model, config, shapes, recipe.generation_ranks)
            found.append((count_sharded_rdt(model, config, shapes), mapped + whole, mapped))
    engines = recipe.generation_ranks // slots
    return Received(*(engines * sum(column) for column in zip(*found, strict=True)))


def count_sharded_rdt(model: torch.nn.Module, config: VllmConfig, shapes: Mapping[str, Shape]) -> int:
    """Return the bytes that one worker pulls, from the plan that vLLM's engine bakes."""
    on_ray = copy.copy(config)
    on_ray.parallel_config = copy.copy(config.parallel_config)
    on_ray.parallel_config.distributed_executor_backend = "ray"  # the engine requires it; baking needs no Ray
    groups = layerwise_groups([*shapes])
    names, lengths = [name for group in groups for name in group], [len(group) for group in groups]
    info = ShardedRDTWeightTransferInitInfo(
        names=names,
        dtype_names=[_dtype(config)] * len(names),
        shapes=[[*shapes[name]] for name in names],
        group_lens=lengths,
    )
    transfer = WeightTransferConfig(backend="sharded_rdt")
    engine = ShardedRDTWeightTransferEngine(transfer, on_ray, torch.device("meta"), model)
    engine._router = RdtRouter(1, 1, names=names, group_lens=lengths)  # who serves a slice does not change its size
    engine._bake(info)
    engine._build_static_plan(info)
    plan = engine._cached_plan
    assert plan is not None, "it has just been built"
    return sum(numel * dtype.itemsize for chunk in plan.chunks for _, dtype, numel, _ in chunk.pack_layout)


def count_m2n(model: torch.nn.Module, config: VllmConfig, shapes: Mapping[str, Shape], workers: int) -> tuple[int, int]:
    """Return the bytes that one worker receives of parameters that are mapped 1:1, and of whole tensors.

    Args:
        workers: those of all engines.
    """
    dtype, parallel = getattr(torch, _dtype(config)), config.parallel_config
    destinations = resolve_parameter_destinations(
        model,
        [*shapes],
        [dtype] * len(shapes),
        [*shapes.values()],
        num_workers=workers,
        shard_axis_size=parallel.tensor_parallel_size,
        allow_direct=config.model_config.quantization is None and parallel.pipeline_parallel_size == 1,
    )
    mapped = sum(one.tensor.nbytes for one in destinations if one.tensor is not None)
    whole = sum(math.prod(shapes[one.name]) * dtype.itemsize for one in destinations if one.tensor is None)
    return mapped, whole


def _dtype(config: VllmConfig) -> str:
    return str(config.model_config.dtype).removeprefix("torch.")


def format_rows(rows: Sequence[tuple[str, int]], wanted: int) -> str:
    """Return a Markdown table of methods and what they bring, also as a multiple of what the engines want."""
    lines = [f"| {name} | {nbytes:,} | {nbytes / wanted:.2f} |" for name, nbytes in rows]
    return "\n".join(["| method | bytes received, all ranks | of what engines want |", "|---|---|---|", *lines])
