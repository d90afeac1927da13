"""Ask vLLM about a run that does not run: any rank of any TP, on meta, in this one process.

vLLM means to talk to its peers while it builds: it makes gloo groups, device communicators and a message queue, and
asks who shares its node and which experts are its own. Over torch's `fake` process group there is nobody, so those are
answered here.
"""

from __future__ import annotations

import contextlib
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from hybrid3d.config import Recipe
from hybrid3d.families import Config, family_of
from hybrid3d.reshard.layout import Demand, Piece, Shape
from hybrid3d.reshard.stamp import layer_of, stamped
from hybrid3d.rollout import engine
from hybrid3d.rollout.record import UnsupportedLoader
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


def demand_of_all(config: Config, recipe: Recipe, shapes: Mapping[str, Shape]) -> dict[int, Asked]:
    """What each rank of the recipe's rollout layout wants of the canonical tensors; replicas share what they want.

    vLLM is asked about the shortest model that has a layer of each kind; `demand_of` would say the same of each rank,
    and takes minutes for hundreds of layers with experts.
    """
    assert recipe.rollout is not None, "checked when the recipe was read"
    kinds = family_of(config).kinds(config)
    layers = max(kinds) + 1
    few = {name: shape for name, shape in shapes.items() if (layer_of(name) or 0) < layers}
    ranks = recipe.rollout.tp * recipe.rollout.dp
    first = [_over_layers(demand_of(recipe, few, rank, layers), kinds) for rank in range(ranks)]
    return {rank: first[rank % ranks] for rank in range(recipe.world_size)}


def demand_of(recipe: Recipe, shapes: Mapping[str, Shape], rank: int, layers: int | None = None) -> Asked:
    """What a rank of one engine wants, as its whole share of the model says, or that of a model with so many layers."""
    with model_of_rank(recipe, rank, layers=layers) as (model, config):
        weights = RolloutWeights(model, config, shapes)
        return Asked(weights.demand, weights.largest_unit_bytes)


def _over_layers(asked: Asked, kinds: Sequence[int]) -> Asked:
    """What was asked of one layer of each kind, for all layers."""
    filled = [fill.view.tensor for fill in asked.demand.fills if layer_of(fill.view.tensor) is not None]
    if filled:
        raise UnsupportedLoader(f"vLLM's loader fills {filled[0]} with a constant: no plan repeats that for all layers")
    at: dict[int | None, list[Piece]] = defaultdict(list)
    for piece in asked.demand.pieces:
        at[layer_of(piece.view.tensor)].append(piece)
    inside = [piece for layer, kind in enumerate(kinds) for piece in stamped(at[kind], kind, layer)]
    return replace(asked, demand=Demand((*inside, *at[None]), asked.demand.fills))


@contextlib.contextmanager
def model_of_rank(
    recipe: Recipe, rank: int, device: str = "meta", layers: int | None = None
) -> Iterator[tuple[torch.nn.Module, VllmConfig]]:
    """vLLM's own model as a rank of the recipe's rollout layout builds it, not loaded, and its config.

    Args:
        rank: within one engine of `rollout.tp` x `rollout.dp` ranks.
        layers: build so many only.
    """
    assert recipe.rollout is not None
    world = recipe.rollout.tp * recipe.rollout.dp
    with _as_rank(rank, world), engine.external_rank(rank, recipe.rollout):
        config = EngineArgs(**engine.engine_settings(recipe, layers)).create_engine_config()
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

    hook = sys.excepthook  # torch puts another in front of it for each group
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
            sys.excepthook = hook
