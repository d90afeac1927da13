"""Ask vLLM about a run that does not run: any rank of any TP, on meta, in this one process.

vLLM means to talk to its peers while it builds: it makes gloo groups, device communicators and a message queue, and
asks who shares its node and which experts are its own. Over torch's `fake` process group there is nobody, so those are
answered here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from hybrid3d.config import Recipe
from hybrid3d.reshard.layout import Demand, Shape
from hybrid3d.rollout import engine
from hybrid3d.rollout.weights import RolloutWeights

from vllm.config import VllmConfig, set_current_vllm_config  # isort: skip
from vllm.distributed import parallel_state  # isort: skip
from vllm.engine.arg_utils import EngineArgs  # isort: skip
from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager  # isort: skip
from vllm.model_executor.model_loader.utils import initialize_model  # isort: skip
from vllm.utils.torch_utils import set_default_torch_dtype  # isort: skip


@dataclass(frozen=True)
class Asked:
    """What a rank wants, and the bytes of its largest module, which bound what finalization takes."""

    demand: Demand
    finalize_bytes: int


def demand_of_all(recipe: Recipe, shapes: Mapping[str, Shape]) -> dict[int, Asked]:
    """What each rank of the recipe's rollout layout wants; replicas want the same."""
    assert recipe.rollout is not None, "checked when the recipe was read"
    distinct = recipe.rollout.tp * recipe.rollout.dp
    first = [_ask(recipe, shapes, rank) for rank in range(distinct)]
    return {rank: first[rank % distinct] for rank in range(recipe.world_size)}


def _ask(recipe: Recipe, shapes: Mapping[str, Shape], rank: int) -> Asked:
    with model_of_rank(recipe, rank) as (model, config):
        weights = RolloutWeights(model, config, shapes)
        return Asked(weights.demand, weights.largest_unit_bytes)


@contextlib.contextmanager
def model_of_rank(recipe: Recipe, rank: int, device: str = "meta") -> Iterator[tuple[torch.nn.Module, VllmConfig]]:
    """vLLM's own model as a rank of the recipe's rollout layout builds it, not loaded, and its config.

    Args:
        rank: within one engine of `rollout.tp` x `rollout.dp` ranks.
    """
    assert recipe.rollout is not None
    world = recipe.rollout.tp * recipe.rollout.dp
    with _as_rank(rank, world), engine.external_rank(rank, recipe.rollout):
        config = EngineArgs(**engine.engine_settings(recipe)).create_engine_config()
        with set_current_vllm_config(config):
            parallel_state.init_distributed_environment(world, rank, "env://", rank, backend="fake")
            parallel_state.initialize_model_parallel(recipe.rollout.tp, 1, backend="fake")
            with set_default_torch_dtype(config.model_config.dtype), torch.device(device):
                model = initialize_model(vllm_config=config)
        yield model, config


@contextlib.contextmanager
def _as_rank(rank: int, world: int) -> Iterator[None]:
    new_group, make_group = dist.new_group, parallel_state.init_model_parallel_group

    def group_without_queue(*args: Any, **kwargs: Any) -> Any:
        return make_group(*args, **{**kwargs, "use_message_queue_broadcaster": False, "use_device_communicator": False})

    make_map = ExpertMapManager.__init__

    def map_on_cpu(*args: Any, **kwargs: Any) -> None:
        with torch.device("cpu"):  # loaders read from it which experts are theirs
            make_map(*args, **kwargs)

    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    with (
        mock.patch.object(dist, "new_group", lambda *a, **k: new_group(*a, **{**k, "backend": "fake"})),
        mock.patch.object(parallel_state, "init_model_parallel_group", group_without_queue),
        mock.patch.object(ExpertMapManager, "__init__", map_on_cpu),
        mock.patch.object(parallel_state, "in_the_same_node_as", return_value=[True] * world),
    ):
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()
            if dist.is_initialized():
                dist.destroy_process_group()
