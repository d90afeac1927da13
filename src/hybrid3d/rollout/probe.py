"""Ask vLLM about a run that does not run: any rank of any TP, on meta, in this one process.

vLLM means to talk to its peers while it builds: it makes gloo groups, device communicators and a message queue, and
asks who shares its node and which experts are its own. Over torch's `fake` process group there is nobody, so those are
answered here.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from hybrid3d.config import Recipe
from hybrid3d.families import EXPERT, Config, family_of
from hybrid3d.reshard.layout import Demand, Piece, Shape
from hybrid3d.reshard.stamp import layer_of, replicate_layer
from hybrid3d.rollout import engine
from hybrid3d.rollout.patches import as_rank, external_rank
from hybrid3d.rollout.record import UnsupportedLoader
from hybrid3d.rollout.weights import RolloutWeights

from vllm.config import VllmConfig, get_layers_from_vllm_config, set_current_vllm_config  # isort: skip
from vllm.distributed import parallel_state  # isort: skip
from vllm.engine.arg_utils import EngineArgs  # isort: skip
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase  # isort: skip
from vllm.model_executor.layers.fused_moe.expert_map_manager import determine_expert_map  # isort: skip
from vllm.model_executor.model_loader.utils import initialize_model  # isort: skip
from vllm.utils.torch_utils import set_default_torch_dtype  # isort: skip


@dataclass(frozen=True)
class SlotDemand:
    """What a slot wants, and what else it takes.

    Attributes:
        finalize_bytes: a bound on what opened modules take.
        kv_bytes: what the KV cache takes of a token, by layer.
    """

    demand: Demand
    finalize_bytes: int
    kv_bytes: Mapping[int, int]


def slot_demands(
    config: Config,
    recipe: Recipe,
    shapes: Mapping[str, Shape],
    layers: Container[int] | None = None,
    first_only: bool = False,
) -> list[SlotDemand]:
    """What each slot of an engine of the recipe's rollout layout wants of the canonical tensors.

    vLLM is asked about the shortest model that has a layer of each kind, and, where experts are dealt out, about one
    share of them and its map of all: `demand_of` would say the same of each slot, and takes minutes for hundreds.

    Args:
        layers: leave the others out.
        first_only: only of the first slot, which wants a largest share.
    """
    rollout = recipe.rollout
    assert rollout is not None, "checked when the recipe was read"
    kinds = family_of(config).representative_layers(config)
    few = {name: shape for name, shape in shapes.items() if (layer_of(name) or 0) <= max(kinds)}
    slots = rollout.tp * rollout.dp
    asked = [trace_demand(recipe, few, slot, max(kinds) + 1) for slot in range(1 if first_only else rollout.tp)]
    if slots > rollout.tp and not first_only:
        experts = family_of(config).experts(config)
        assert experts is not None, "checked with the recipe: engines of several replicas share experts"
        shares = expert_shares(experts.count, slots)
        every = [_with_experts(asked[slot % rollout.tp], asked[0], shares[slot]) for slot in range(slots)]
        if every[: rollout.tp] != asked:
            raise UnsupportedLoader("vLLM's loader does not put experts where its own map of experts has them")
        asked = every
    return [_over_layers(one, kinds, layers) for one in asked]


def expert_shares(experts: int, slots: int) -> list[dict[int, int]]:
    """The experts that vLLM gives each slot of an expert-parallel engine, by their places there."""
    maps = [determine_expert_map(slots, slot, experts)[1].tolist() for slot in range(slots)]
    return [{place: expert for expert, place in enumerate(found) if place >= 0} for found in maps]


def _with_experts(asked: SlotDemand, first: SlotDemand, share: Mapping[int, int]) -> SlotDemand:
    """What was asked of a slot, with another share of the experts.

    Args:
        first: what was asked of the first slot, which has a largest share: it says what each place among them takes.
        share: the expert in each place.
    """
    places: dict[str, int] = {}
    experts: dict[int | None, list[Piece]] = defaultdict(list)
    for piece in first.demand.pieces:
        found = EXPERT.search(piece.name)
        if found and places.setdefault(found[0], len(places)) in share:
            named = EXPERT.sub(str(share[places[found[0]]]), piece.name)
            experts[layer_of(piece.name)].append(replace(piece, name=named))
    pieces: list[Piece] = []
    for piece in asked.demand.pieces:
        if EXPERT.search(piece.name):
            pieces += experts.pop(layer_of(piece.name), ())  # in place of the first of its layer
        else:
            pieces.append(piece)
    pieces += [piece for of_layer in experts.values() for piece in of_layer]
    return replace(asked, demand=replace(asked.demand, pieces=tuple(pieces)))


def trace_demand(recipe: Recipe, shapes: Mapping[str, Shape], rank: int, layers: int | None = None) -> SlotDemand:
    """What a rank of one engine wants, as its whole share of the model says, or that of a model with so many layers."""
    with model_of_rank(recipe, rank, layers=layers) as (model, config):
        weights = RolloutWeights(model, config, shapes)
        return SlotDemand(weights.demand, weights.max_finalize_bytes, dict(_kv_bytes(config)))


def _kv_bytes(config: VllmConfig) -> Iterator[tuple[int, int]]:
    """By layer, what its attention keeps of a token."""
    for name, attention in get_layers_from_vllm_config(config, AttentionLayerBase).items():
        spec = attention.get_kv_cache_spec(config)
        layer = layer_of(f"{name}.")
        assert layer is not None, f"attention outside of layers: {name}"
        yield layer, spec.page_size_bytes // spec.block_size


def _over_layers(asked: SlotDemand, kinds: Sequence[int], wanted: Container[int] | None) -> SlotDemand:
    """What was asked of one layer of each kind, for all layers, or for those wanted."""
    filled = [fill.view.tensor for fill in asked.demand.fills if layer_of(fill.view.tensor) is not None]
    if filled:
        raise UnsupportedLoader(f"vLLM's loader fills {filled[0]} with a constant: no plan repeats that for all layers")
    at: dict[int | None, list[Piece]] = defaultdict(list)
    for piece in asked.demand.pieces:
        at[layer_of(piece.view.tensor)].append(piece)
    layers = [layer for layer in range(len(kinds)) if wanted is None or layer in wanted]
    inside = [piece for layer in layers for piece in replicate_layer(at[kinds[layer]], kinds[layer], layer)]
    return replace(
        asked,
        demand=Demand((*inside, *at[None]), asked.demand.fills),
        kv_bytes={layer: asked.kv_bytes[kind] for layer, kind in enumerate(kinds)},
    )


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
    with as_rank(rank, world), external_rank(rank, recipe.rollout):
        config = EngineArgs(**engine.engine_settings(recipe, layers)).create_engine_config()
        with set_current_vllm_config(config):
            parallel_state.init_distributed_environment(world, rank, "env://", rank, backend="fake")
            parallel_state.initialize_model_parallel(recipe.rollout.tp, 1, backend="fake")
            with set_default_torch_dtype(config.model_config.dtype), torch.device(device):
                model = initialize_model(vllm_config=config)
        yield model, config
