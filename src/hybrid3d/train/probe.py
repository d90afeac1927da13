"""Ask Megatron about a run that does not run: any rank of any world, on meta, in this one process."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Container
from dataclasses import dataclass, replace

import torch
from megatron.core.parallel_state import RankGenerator
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from hybrid3d.config import Recipe, Train
from hybrid3d.families import Config, family_of
from hybrid3d.reshard.classes import signature_of
from hybrid3d.reshard.layout import Holdings, Piece, Shape
from hybrid3d.reshard.stamp import layer_of, replicate_layer
from hybrid3d.train.model import build_model, transformer_config
from hybrid3d.train.runtime import as_rank
from hybrid3d.train.weights import canonical_shapes, megatron_weights


def expected_shapes(config: Config) -> dict[str, Shape]:
    """Every canonical tensor that a checkpoint of this config must have, and its full shape."""
    return canonical_shapes([signature_of(_replicate_layer(config, Train(), torch.float32)[0])])


def holdings_of_all(
    config: Config, recipe: Recipe, layers: Container[int] | None = None, first_only: bool = False
) -> dict[int, Holdings]:
    """What each rank of the recipe's train layout holds; ranks that hold the same share one object.

    Megatron is asked about a layer of each kind, and which layers each stage has; `holdings_of` would say the same of
    each rank, and takes minutes for hundreds of them.

    Args:
        layers: leave the others out.
        first_only: only of the first rank of each stage, and of those that hold the same.
    """
    return _replicate_layer(config, recipe.train, getattr(torch, recipe.model.dtype), layers, first_only)


def standing_layers(config: Config, layout: Train) -> dict[int, int]:
    """The first layer of each kind in every stage's every chunk, and how many layers there it stands for."""
    kinds = family_of(config).representative_layers(config)
    stages = layers_of_stages(config, layout)
    alike: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for stage, chunks in enumerate(stages):
        for chunk, layers in enumerate(chunks):
            for layer in layers:
                alike[stage, chunk, kinds[layer]].append(layer)
    return {layers[0]: len(layers) for layers in alike.values()}


def holdings_of(config: Config, layout: Train, rank: int, dtype: torch.dtype) -> Holdings:
    """What a rank of a train layout holds, as its whole share of the model says."""
    with as_rank(rank, layout, layout.tp * layout.pp * layout.cp * layout.dp):
        return megatron_weights(build_model(config, layout, dtype, meta=True), config).holdings


def _replicate_layer(
    config: Config,
    layout: Train,
    dtype: torch.dtype,
    wanted: Container[int] | None = None,
    first_only: bool = False,
) -> dict[int, Holdings]:
    stage_ranks = layout.tp * layout.cp * layout.dp  # Megatron's ranks are those of one stage after the other
    kinds = family_of(config).representative_layers(config)
    stages = layers_of_stages(config, layout)
    found: dict[int, Holdings] = {}
    ask_last = functools.cache(lambda rank: _ask_last(config, layout, rank, dtype, max(kinds) + 1))
    for ranks in _ranks_alike(layout)[: 1 if first_only else None]:
        first = _ask_first(config, layout, ranks[0], dtype, layers=max(kinds) + 1)
        last = ask_last(ranks[0] % layout.tp)  # outside of layers TP alone shards, and Megatron's ranks count it first
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
                        pieces += replicate_layer(first.layers[kind], kind, layer, local)
                pieces += [_in_chunk(piece, chunk) for end in outer for piece in end.after]
            found |= dict.fromkeys((stage * stage_ranks + rank for rank in ranks), Holdings(tuple(pieces)))
    return dict(sorted(found.items()))


def _ranks_alike(layout: Train) -> list[list[int]]:
    """The ranks of a stage that hold the same: those whose places in Megatron's TP, ETP and EP groups are the same."""
    size = layout.tp * layout.cp * layout.dp
    order = "tp-cp-ep-dp-pp"  # the default of `initialize_model_parallel`, which is not told another
    experts = RankGenerator(layout.etp, layout.ep, size // (layout.etp * layout.ep), 1, 1, order)
    dense = RankGenerator(layout.tp, 1, layout.dp, 1, layout.cp, order)
    place: dict[int, list[int]] = defaultdict(list)
    for groups in (dense.get_ranks("tp"), experts.get_ranks("tp"), experts.get_ranks("ep")):
        for group in groups:
            for i, rank in enumerate(group):
                place[rank].append(i)
    alike: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank in range(size):
        alike[tuple(place[rank])].append(rank)
    return list(alike.values())


def layers_of_stages(config: Config, layout: Train) -> list[list[range]]:
    """The layers of each stage's chunks, as Megatron deals them out."""
    settings = transformer_config(config, layout, torch.float32)

    def layers(stage: int, chunk: int | None) -> range:
        start = get_transformer_layer_offset(settings, chunk, stage)
        return range(start, start + get_num_layers_to_build(settings, chunk, stage))

    chunks = range(layout.vpp) if layout.vpp > 1 else [None]
    return [[layers(stage, chunk) for chunk in chunks] for stage in range(layout.pp)]


@dataclass(frozen=True)
class _End:
    """What a rank of the first or the last stage holds in front of its layers, in each, and behind them."""

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


def _ask_first(config: Config, layout: Train, rank: int, dtype: torch.dtype, layers: int) -> _End:
    """What the `rank`-th of a stage's ranks would hold of the first stage, if that had `layers`."""
    plain = replace(layout, pp=1, vpp=1, first_stage_layers=None, last_stage_layers=None)
    if layout.pp == 1:  # the first stage has all that the last would have
        return _End.of(holdings_of({**config, "num_hidden_layers": layers}, plain, rank, dtype))
    plain = replace(plain, pp=2, first_stage_layers=layers)
    return _End.of(holdings_of({**config, "num_hidden_layers": layers + 1}, plain, rank, dtype))


def _ask_last(config: Config, layout: Train, rank: int, dtype: torch.dtype, layers: int) -> _End:
    """What the `rank`-th of a stage's ranks would hold of the last stage, behind `layers`; nothing where one is all."""
    if layout.pp == 1:
        return _End([], {}, [])
    plain = replace(layout, pp=2, vpp=1, first_stage_layers=layers, last_stage_layers=None)
    there = rank + layout.tp * layout.cp * layout.dp
    return _End.of(holdings_of({**config, "num_hidden_layers": layers + 1}, plain, there, dtype))


def _in_chunk(piece: Piece, chunk: int) -> Piece:
    name = piece.view.tensor.replace("stage0.", f"stage{chunk}.", 1)
    return replace(piece, view=replace(piece.view, tensor=name))
