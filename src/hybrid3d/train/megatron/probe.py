"""Queries Megatron about any rank of any train layout, on meta tensors in a single process."""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace

import torch
from megatron.core.parallel_state import RankGenerator
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from hybrid3d.config import Lora, Recipe, Train
from hybrid3d.families import Config, family_of
from hybrid3d.reshard.plan.classes import canonical_shapes, layer_of, replicate_layer, signature_of
from hybrid3d.reshard.plan.layout import Holdings, Piece, Shape
from hybrid3d.train.megatron.adapters import adapter_weights, add_adapters
from hybrid3d.train.megatron.build import build_model, transformer_config
from hybrid3d.train.megatron.runtime import as_rank
from hybrid3d.train.megatron.source import megatron_weights

Query = Callable[[Config, Train, int, torch.dtype], Holdings]


def expected_shapes(config: Config, with_mtp: bool = False) -> dict[str, Shape]:
    """Return the full shape of every canonical tensor that a checkpoint of this config must have.

    `with_mtp`: also of its layers for multi-token prediction, but for the copies of other tensors.
    """
    held = [_holdings_by_layer(config, Train(), torch.float32)[0]]
    if with_mtp:
        held.append(_mtp_holdings(config, Train(), torch.float32))
    return canonical_shapes([signature_of(one) for one in held])


def mtp_holdings(config: Config, recipe: Recipe) -> Holdings:
    """Return what the first rank of the last stage holds of the layer for multi-token prediction."""
    return _mtp_holdings(config, recipe.train, getattr(torch, recipe.model.dtype))


def _mtp_holdings(config: Config, layout: Train, dtype: torch.dtype) -> Holdings:
    layers = max(family_of(config).representative_layers(config)) + 1
    few = {**config, "num_hidden_layers": layers}
    plain = replace(layout, pp=1, vpp=1, first_stage_layers=None, last_stage_layers=None)
    pieces = [p for p in holdings_of(few, plain, 0, dtype, with_mtp=True).pieces if layer_of(p.name) == layers]
    return Holdings((*replicate_layer(pieces, layers, config["num_hidden_layers"]),))


def holdings_of_all(
    config: Config, recipe: Recipe, layers: Container[int] | None = None, first_only: bool = False
) -> dict[int, Holdings]:
    """Return what each rank of the recipe's train layout holds; ranks with equal holdings share one object.

    Megatron is queried about one layer of each kind, and about the layers of each stage. `holdings_of` returns the
    same for one rank, and takes minutes for hundreds of ranks.

    Args:
        layers: return pieces of these layers only; None stands for all.
        first_only: return only the first rank of each stage, and ranks with equal holdings.
    """
    return _holdings_by_layer(config, recipe.train, getattr(torch, recipe.model.dtype), layers, first_only)


def adapter_holdings_of_all(
    config: Config, recipe: Recipe, shapes: Mapping[str, Shape], layers: Container[int] | None = None
) -> dict[int, Holdings]:
    """Return what each rank holds of its adapters as `holdings_of_all` does; `shapes`: of all canonical tensors."""
    assert recipe.lora is not None, "called where the recipe has adapters"
    query = functools.partial(adapter_holdings_of, lora=recipe.lora, shapes=shapes)
    return _holdings_by_layer(config, recipe.train, getattr(torch, recipe.model.dtype), layers, of_adapters=query)


def representative_layer_counts(config: Config, layout: Train) -> dict[int, int]:
    """Return the first layer of each kind in each chunk of each stage, and how many layers there it represents."""
    kinds = family_of(config).representative_layers(config)
    by_kind: dict[tuple[int, int], list[int]] = defaultdict(list)
    for chunk, layers in enumerate(itertools.chain(*layers_of_stages(config, layout))):
        for layer in layers:
            by_kind[chunk, kinds[layer]].append(layer)
    return {layers[0]: len(layers) for layers in by_kind.values()}


def holdings_of(config: Config, layout: Train, rank: int, dtype: torch.dtype, with_mtp: bool = False) -> Holdings:
    """Return what a rank of a train layout holds, from its full share of the model; `with_mtp` as for `build_model`."""
    with as_rank(rank, layout, layout.tp * layout.pp * layout.cp * layout.dp):
        return megatron_weights(build_model(config, layout, dtype, meta=True, with_mtp=with_mtp), config).holdings


def adapter_holdings_of(
    config: Config, layout: Train, rank: int, dtype: torch.dtype, lora: Lora, shapes: Mapping[str, Shape]
) -> Holdings:
    """Return what a rank of a train layout holds of its adapters, from its full share of the model."""
    with as_rank(rank, layout, layout.tp * layout.pp * layout.cp * layout.dp):
        stages = build_model(config, layout, dtype, meta=True, adapted=True)
        add_adapters(stages, megatron_weights(stages, config), shapes, lora, seed=0)
        return adapter_weights(stages).holdings


def _holdings_by_layer(
    config: Config,
    layout: Train,
    dtype: torch.dtype,
    wanted: Container[int] | None = None,
    first_only: bool = False,
    of_adapters: Query | None = None,
) -> dict[int, Holdings]:
    """Adapters are in layers only, and are called by their canonical names."""
    kinds = family_of(config).representative_layers(config)
    stages = layers_of_stages(config, layout)
    found: dict[int, Holdings] = {}
    query_last_stage = functools.cache(lambda rank: _query_last_stage(config, layout, rank, dtype, max(kinds) + 1))
    for ranks in _equal_ranks(layout)[: 1 if first_only else None]:
        first = _query_first_stage(config, layout, ranks[0], dtype, max(kinds) + 1, of_adapters or holdings_of)
        # Outside of layers only TP shards, and Megatron numbers TP ranks consecutively.
        has_last = layout.pp > 1 and of_adapters is None
        last = query_last_stage(ranks[0] % layout.tp) if has_last else _End([], {}, [])
        for stage, chunks in enumerate(stages):
            pieces: list[Piece] = []
            for chunk, layers in enumerate(chunks):
                starts, ends = stage == chunk == 0, stage == len(stages) - 1 and chunk == len(chunks) - 1
                outer = [first] * starts + [last] * ends
                pieces += [_in_chunk(piece, chunk) for end in outer for piece in end.before]
                for number, layer in enumerate(layers):
                    if wanted is None or layer in wanted:
                        kind = kinds[layer]
                        local = f"stage0.decoder.layers.{kind}.", f"stage{chunk}.decoder.layers.{number}."
                        names = local if of_adapters is None else None
                        pieces += replicate_layer(first.layers.get(kind, ()), kind, layer, names)
                pieces += [_in_chunk(piece, chunk) for end in outer for piece in end.after]
            found |= dict.fromkeys((stage * _stage_ranks(layout) + rank for rank in ranks), Holdings(tuple(pieces)))
    return dict(sorted(found.items()))


def _stage_ranks(layout: Train) -> int:
    return layout.tp * layout.cp * layout.dp  # Megatron numbers the ranks of one stage consecutively


def _equal_ranks(layout: Train) -> list[list[int]]:
    """Return the sets of a stage's ranks with equal holdings: equal positions in the TP, ETP and EP groups."""
    size = _stage_ranks(layout)
    order = "tp-cp-ep-dp-pp"  # the default of `initialize_model_parallel`
    experts = RankGenerator(layout.etp, layout.ep, size // (layout.etp * layout.ep), 1, 1, order)
    dense = RankGenerator(layout.tp, 1, layout.dp, 1, layout.cp, order)
    axes = dense.get_ranks("tp"), experts.get_ranks("tp"), experts.get_ranks("ep")
    places = [{rank: i for group in groups for i, rank in enumerate(group)} for groups in axes]
    by_place: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank in range(size):
        by_place[tuple(place[rank] for place in places)].append(rank)
    return list(by_place.values())


def layers_of_stages(config: Config, layout: Train) -> list[list[range]]:
    """Return the layers of each stage's chunks, as Megatron assigns them."""
    settings = transformer_config(config, replace(layout, fp8="none"), torch.float32)

    def layers(stage: int, chunk: int | None) -> range:
        start = get_transformer_layer_offset(settings, chunk, stage)
        return range(start, start + get_num_layers_to_build(settings, chunk, stage))

    chunks = range(layout.vpp) if layout.vpp > 1 else [None]
    return [[layers(stage, chunk) for chunk in chunks] for stage in range(layout.pp)]


@dataclass(frozen=True)
class _End:
    """The pieces of a rank of the first or the last stage before its layers, in each layer, and after them."""

    before: list[Piece]
    layers: dict[int, list[Piece]]
    after: list[Piece]

    @classmethod
    def of(cls, held: Holdings) -> _End:
        layers: dict[int, list[Piece]] = {}
        outside: tuple[list[Piece], list[Piece]] = [], []
        for piece in held.pieces:
            layer = layer_of(piece.name)
            place = outside[bool(layers)] if layer is None else layers.setdefault(layer, [])
            place.append(piece)
        return cls(outside[0], layers, outside[1])


def _query_first_stage(
    config: Config,
    layout: Train,
    rank: int,
    dtype: torch.dtype,
    layers: int,
    query: Query,
) -> _End:
    """Return the pieces of the `rank`-th rank of a first stage with `layers` layers."""
    plain = replace(layout, pp=1, vpp=1, first_stage_layers=None, last_stage_layers=None)
    if layout.pp == 1:  # the only stage is both first and last
        return _End.of(query({**config, "num_hidden_layers": layers}, plain, rank, dtype))
    plain = replace(plain, pp=2, first_stage_layers=layers)
    return _End.of(query({**config, "num_hidden_layers": layers + 1}, plain, rank, dtype))


def _query_last_stage(config: Config, layout: Train, rank: int, dtype: torch.dtype, layers: int) -> _End:
    """Return the pieces of the `rank`-th rank of a last stage that follows `layers` layers."""
    plain = replace(layout, pp=2, vpp=1, first_stage_layers=layers, last_stage_layers=None)
    there = rank + _stage_ranks(layout)
    return _End.of(holdings_of({**config, "num_hidden_layers": layers + 1}, plain, there, dtype))


def _in_chunk(piece: Piece, chunk: int) -> Piece:
    name = piece.view.tensor.replace("stage0.", f"stage{chunk}.", 1)
    return replace(piece, view=replace(piece.view, tensor=name))
