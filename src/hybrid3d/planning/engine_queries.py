"""Queries both engines about all ranks of a recipe's layouts, in one process and on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hybrid3d.config import Recipe
from hybrid3d.families import Config, is_quantized
from hybrid3d.reshard.fp8 import quantized_holdings, quantized_shapes
from hybrid3d.reshard.plan.classes import group_ranks, layer_of, rank_groups
from hybrid3d.reshard.plan.coverage import check_same_tensors
from hybrid3d.reshard.plan.layout import Holdings, Shape
from hybrid3d.rollout.probe import SlotDemand, slot_demands
from hybrid3d.train.megatron.probe import expected_shapes, holdings_of_all, representative_layer_counts

ProgressCallback = Callable[[str], None]

# With more wanted pieces than this, the plan is not made transfer by transfer, which would take minutes or hours.
MAX_FULL_PLAN_PIECES = 20_000


@dataclass(frozen=True)
class EngineAnswers:
    """The answers of both engines about a recipe's layouts.

    Attributes:
        shapes: the full shape of each canonical tensor of the checkpoint.
        holdings: what each rank holds, of all layers or of the representative ones.
        slots: what each slot of an engine wants.
        multiplicity: the number of tensors that each held tensor represents.
        all_layers: whether every layer was queried, so that each tensor represents only itself.
    """

    shapes: Mapping[str, Shape]
    holdings: Mapping[int, Holdings]
    slots: Sequence[SlotDemand]
    multiplicity: Mapping[str, int]
    all_layers: bool


def synced_shapes(recipe: Recipe, shapes: Mapping[str, Shape]) -> Mapping[str, Shape]:
    """Return the canonical tensors that a sync sends: with the scales of those that are quantized."""
    return quantized_shapes(shapes, is_quantized) if recipe.quantizes else shapes


def quantized_by_rank(holdings: Mapping[int, Holdings]) -> dict[int, Holdings]:
    """Return what ranks hold once they have quantized it; ranks that shared an object share one again."""
    found: dict[int, Holdings] = {}
    for ranks, held in group_ranks(holdings):
        found |= dict.fromkeys(ranks, quantized_holdings(held, is_quantized))
    return dict(sorted(found.items()))


def query_engines(recipe: Recipe, config: Config, on_progress: ProgressCallback = lambda what: None) -> EngineAnswers:
    """Query Megatron about every rank and vLLM about every slot.

    Raises:
        UnsupportedModel: an engine treats a tensor in a way that cannot be planned.
    """
    assert recipe.rollout is not None, "checked when the recipe was read"
    shapes = expected_shapes(config)
    all_layers = len(shapes) * recipe.generation_ranks <= MAX_FULL_PLAN_PIECES
    layer_counts = None if all_layers else representative_layer_counts(config, recipe.train)
    on_progress(f"asking Megatron what {recipe.train_ranks} ranks hold")
    holdings = holdings_of_all(config, recipe, layer_counts)
    on_progress(f"asking vLLM what {recipe.rollout.tp * recipe.rollout.dp} ranks of an engine want")
    if recipe.quantizes:
        holdings = quantized_by_rank(holdings)
    slots = slot_demands(config, recipe, synced_shapes(recipe, shapes), layer_counts)
    held = {piece.name for _, side in group_ranks(holdings) for piece in side.pieces}
    counts = dict[int | None, int]((layer_counts or {}).items())
    multiplicity = {name: counts.get(layer_of(name), 1) for name in held}
    return check_answers(EngineAnswers(shapes, holdings, slots, multiplicity, all_layers))


def check_answers(answers: EngineAnswers) -> EngineAnswers:
    """Return the answers, after checking that the ranks hold the tensors that the slots want."""
    wanted = rank_groups(dict(enumerate(slot.demand for slot in answers.slots)))
    check_same_tensors(rank_groups(answers.holdings), wanted)
    return answers
