"""What both engines say of a recipe's layouts, in this one process and on meta."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hybrid3d.config import Recipe
from hybrid3d.families import Config
from hybrid3d.reshard.classes import group_ranks, rank_groups
from hybrid3d.reshard.coverage import check_same_tensors
from hybrid3d.reshard.layout import Holdings, Shape
from hybrid3d.reshard.stamp import layer_of
from hybrid3d.rollout.probe import SlotDemand, slot_demands
from hybrid3d.train.probe import expected_shapes, holdings_of_all, representative_layer_counts

ProgressCallback = Callable[[str], None]

# Of more wanted pieces than this, the plan is not made transfer by transfer: that would take minutes, or hours.
MAX_FULL_PLAN_PIECES = 20_000


@dataclass(frozen=True)
class EngineAnswers:
    """What both engines say of a recipe's layouts.

    Attributes:
        shapes: of all canonical tensors.
        holdings: of every rank, in all layers or in those that stand for the others.
        slots: what each slot of an engine wants.
        times: how many tensors each one held stands for.
        whole: whether nothing stands for anything else.
    """

    shapes: Mapping[str, Shape]
    holdings: Mapping[int, Holdings]
    slots: Sequence[SlotDemand]
    multiplicity: Mapping[str, int]
    all_layers: bool


def query_engines(recipe: Recipe, config: Config, on_progress: ProgressCallback = lambda what: None) -> EngineAnswers:
    """Ask Megatron about every rank and vLLM about every slot.

    Raises:
        UnsupportedModel: an engine does with a tensor what cannot be planned.
    """
    assert recipe.rollout is not None, "checked when the recipe was read"
    shapes = expected_shapes(config)
    all_layers = len(shapes) * recipe.world_size <= MAX_FULL_PLAN_PIECES
    standing = None if all_layers else representative_layer_counts(config, recipe.train)
    on_progress(f"asking Megatron what {recipe.world_size} ranks hold")
    holdings = holdings_of_all(config, recipe, standing)
    on_progress(f"asking vLLM what {recipe.rollout.tp * recipe.rollout.dp} ranks of an engine want")
    slots = slot_demands(config, recipe, shapes, standing)
    held = {piece.name for _, side in group_ranks(holdings) for piece in side.pieces}
    multiplicity = {name: standing.get(layer_of(name), 1) if standing else 1 for name in held}
    check_same_tensors(rank_groups(holdings), rank_groups(dict(enumerate(one.demand for one in slots))))
    return EngineAnswers(shapes, holdings, slots, multiplicity, all_layers)
