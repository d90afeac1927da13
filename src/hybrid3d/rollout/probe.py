"""Queries vLLM about any rank of any rollout layout, on meta tensors in a single process.

While vLLM builds a model it creates gloo groups, device communicators and a message queue, and it asks which ranks
share its node and which experts are local. The process group here is torch's `fake` one without peers, so these calls
are patched (`patches.as_rank`).
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from hybrid3d.config import Recipe
from hybrid3d.families import EXPERT, Config, family_of
from hybrid3d.reshard.plan.classes import layer_of, replicate_layer
from hybrid3d.reshard.plan.layout import Demand, Piece, Shape
from hybrid3d.rollout import engine
from hybrid3d.rollout.adapters import VllmAdapterSink, adapter_settings, wrap_on_meta
from hybrid3d.rollout.loader_trace import UnsupportedLoader
from hybrid3d.rollout.patches import as_rank, external_rank
from hybrid3d.rollout.sink import VllmSink

from vllm.config import VllmConfig, get_layers_from_vllm_config, set_current_vllm_config  # isort: skip
from vllm.distributed import parallel_state  # isort: skip
from vllm.engine.arg_utils import EngineArgs  # isort: skip
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase  # isort: skip
from vllm.model_executor.layers.fused_moe.expert_map_manager import determine_expert_map  # isort: skip
from vllm.model_executor.model_loader.utils import initialize_model  # isort: skip
from vllm.utils.torch_utils import set_default_torch_dtype  # isort: skip


@dataclass(frozen=True)
class SlotDemand:
    """The demand of a slot in a sync, and its other memory requirements.

    Attributes:
        finalize_bytes: upper bound of the memory that open units take in addition to the live tensors.
        kv_bytes: bytes of KV cache per token, by layer.
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
    """Return the demand of each slot of one engine in the recipe's rollout layout.

    vLLM is queried about the shortest model that has a layer of each kind, and with expert parallelism about one TP
    group's experts and its map of all experts. `trace_demand` gives the same result for each slot, but takes minutes
    for hundreds of slots.

    Args:
        shapes: every canonical tensor and its full shape.
        layers: return the demand for these layers only; None stands for all.
        first_only: return only the first slot, whose share is among the largest.

    Raises:
        UnsupportedLoader: vLLM's loader does something that cannot be replayed.
    """
    rollout = recipe.rollout
    assert rollout is not None, "checked when the recipe was read"
    representatives = family_of(config).representative_layers(config)
    last = max(representatives)
    first_shapes = {name: shape for name, shape in shapes.items() if (layer_of(name) or 0) <= last}
    slots = rollout.tp * rollout.dp
    traced = [trace_demand(recipe, first_shapes, slot, last + 1) for slot in range(1 if first_only else rollout.tp)]
    if slots > rollout.tp and not first_only:
        experts = family_of(config).experts(config)
        assert experts is not None, "checked with the recipe: rollout.dp > 1 requires experts"
        shares = expert_shares(experts.count, slots)
        all_slots = [_with_experts(traced[slot % rollout.tp], traced[0], shares[slot]) for slot in range(slots)]
        if all_slots[: rollout.tp] != traced:
            raise UnsupportedLoader("vLLM's loader does not place experts according to vLLM's own expert map")
        traced = all_slots
    return [
        replace(
            slot_demand,
            demand=_replicate_layers(slot_demand.demand, representatives, layers),
            kv_bytes={layer: slot_demand.kv_bytes[first] for layer, first in enumerate(representatives)},
        )
        for slot_demand in traced
    ]


def expert_shares(experts: int, slots: int) -> list[dict[int, int]]:
    """Return for each slot of an expert-parallel engine the global number of each local expert, as in vLLM's map."""
    maps = [determine_expert_map(slots, slot, experts)[1].tolist() for slot in range(slots)]
    return [{local: expert for expert, local in enumerate(expert_map) if local >= 0} for expert_map in maps]


def _with_experts(slot_demand: SlotDemand, first: SlotDemand, share: Mapping[int, int]) -> SlotDemand:
    """Return a slot's demand with other experts: `share` has the global number of each local one.

    The first slot's share is among the largest: it has the pieces of each local expert.
    """
    local_experts: dict[str, int] = {}
    experts: dict[int | None, list[Piece]] = defaultdict(list)
    for piece in first.demand.pieces:
        match = EXPERT.search(piece.name)
        if match and local_experts.setdefault(match[0], len(local_experts)) in share:
            name = EXPERT.sub(str(share[local_experts[match[0]]]), piece.name)
            experts[layer_of(piece.name)].append(replace(piece, name=name))
    pieces: list[Piece] = []
    for piece in slot_demand.demand.pieces:
        if EXPERT.search(piece.name):
            pieces += experts.pop(layer_of(piece.name), ())  # all at the position of the layer's first expert piece
        else:
            pieces.append(piece)
    pieces += [piece for layer_pieces in experts.values() for piece in layer_pieces]
    return replace(slot_demand, demand=replace(slot_demand.demand, pieces=tuple(pieces)))


def trace_demand(recipe: Recipe, shapes: Mapping[str, Shape], rank: int, layers: int | None = None) -> SlotDemand:
    """Return the demand of one rank of an engine, recorded while vLLM loads its share of the model, or of some layers.

    Raises:
        UnsupportedLoader: vLLM's loader does something that cannot be replayed.
    """
    with model_of_rank(recipe, rank, layers=layers) as (model, config):
        sink = VllmSink(model, config)
        return SlotDemand(sink.demand_for(shapes), sink.max_finalize_bytes, dict(_kv_bytes(config)))


def adapter_demands(
    config: Config,
    recipe: Recipe,
    shapes: Mapping[str, Shape],
    matrices: Mapping[str, Shape],
    layers: Container[int] | None = None,
) -> list[SlotDemand]:
    """Return what each slot of one engine wants of the adapters, from the shortest model that has each kind of layer.

    Args:
        shapes: every canonical tensor of the model and its full shape.
        matrices: the same of the adapters, by their names in PEFT's files.
        layers: return the demand for these layers only; None stands for all.

    Raises:
        UnsupportedLoader: vLLM has no slot for an adapter.
    """
    assert recipe.rollout is not None, "checked when the recipe was read"
    representatives = family_of(config).representative_layers(config)
    last = max(representatives)
    first = {name: shape for name, shape in matrices.items() if (layer_of(name) or 0) <= last}
    traced = [trace_adapter_demand(recipe, shapes, first, slot, last + 1) for slot in range(recipe.rollout.tp)]
    return [SlotDemand(_replicate_layers(demand, representatives, layers), 0, {}) for demand in traced]


def trace_adapter_demand(
    recipe: Recipe, shapes: Mapping[str, Shape], matrices: Mapping[str, Shape], rank: int, layers: int | None = None
) -> Demand:
    """Return what one rank of an engine wants of the adapters, recorded while vLLM fills its slot for them.

    Arguments and errors: as for `adapter_demands` and `trace_demand`.
    """
    assert recipe.lora is not None, "called where the recipe has adapters"
    settings = adapter_settings(recipe.lora, shapes)
    with model_of_rank(recipe, rank, layers=layers, settings=settings) as (model, config):
        return VllmAdapterSink(wrap_on_meta(model, config), recipe.lora).demand_for(matrices)


def _kv_bytes(config: VllmConfig) -> Iterator[tuple[int, int]]:
    """Yield each layer and the bytes of KV cache that its attention needs per token."""
    for name, attention in get_layers_from_vllm_config(config, AttentionLayerBase).items():
        spec = attention.get_kv_cache_spec(config)
        layer = layer_of(f"{name}.")
        assert layer is not None, f"attention outside of layers: {name}"
        yield layer, spec.page_size_bytes // spec.block_size


def _replicate_layers(demand: Demand, representatives: Sequence[int], wanted: Container[int] | None) -> Demand:
    """Extend a demand that has one layer of each kind to the layers that are wanted; None stands for all.

    `representatives` has for each layer the layer of its kind that the demand has.
    """
    filled = [fill.view.tensor for fill in demand.fills if layer_of(fill.view.tensor) is not None]
    if filled:
        raise UnsupportedLoader(
            f"vLLM's loader fills {filled[0]} with a constant: constants are supported outside of layers only"
        )
    pieces_by_layer: dict[int | None, list[Piece]] = defaultdict(list)
    for piece in demand.pieces:
        pieces_by_layer[layer_of(piece.view.tensor)].append(piece)
    layer_pieces = [
        piece
        for layer, representative in enumerate(representatives)
        if wanted is None or layer in wanted
        for piece in replicate_layer(pieces_by_layer[representative], representative, layer)
    ]
    return Demand((*layer_pieces, *pieces_by_layer[None]), demand.fills)


@contextlib.contextmanager
def model_of_rank(
    recipe: Recipe,
    rank: int,
    device: str = "meta",
    layers: int | None = None,
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> Iterator[tuple[torch.nn.Module, VllmConfig]]:
    """Build vLLM's model as one rank of the rollout layout does, without loading weights; yield it and its config.

    Args:
        rank: within one engine of `rollout.tp` x `rollout.dp` ranks.
        layers: build only so many layers; None builds the whole model.
        settings: further arguments of vLLM.
    """
    assert recipe.rollout is not None
    world = recipe.rollout.tp * recipe.rollout.dp
    with as_rank(rank, world), external_rank(rank, recipe.rollout):
        config = EngineArgs(**engine.engine_settings(recipe, layers), **settings).create_engine_config()
        with set_current_vllm_config(config):
            # Local rank 0 for every rank: vLLM looks its device up among those in CUDA_VISIBLE_DEVICES.
            parallel_state.init_distributed_environment(world, rank, "env://", 0, backend="fake")
            parallel_state.initialize_model_parallel(recipe.rollout.tp, 1, backend="fake")
            with set_default_torch_dtype(config.model_config.dtype), torch.device(device):
                model = initialize_model(vllm_config=config)
        yield model, config
