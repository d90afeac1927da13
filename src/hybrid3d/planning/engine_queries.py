"""What both engines say of a recipe's layouts, in this one process and on meta."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hybrid3d.config import Recipe
from hybrid3d.families import Config
from hybrid3d.reshard.classes import distinct, groups_of
from hybrid3d.reshard.coverage import check_same_tensors
from hybrid3d.reshard.layout import Holdings, Shape
from hybrid3d.reshard.stamp import layer_of
from hybrid3d.rollout.probe import SlotDemand, demand_of_slots
from hybrid3d.train.probe import expected_shapes, holdings_of_all, standing_layers

Say = Callable[[str], None]

# Of more wanted pieces than this, the plan is not made transfer by transfer: that would take minutes, or hours.
WHOLE_PLAN = 20_000


@dataclass(frozen=True)
class Sides:
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
    times: Mapping[str, int]
    whole: bool


def query_engines(recipe: Recipe, config: Config, say: Say = lambda what: None) -> Sides:
    """Ask Megatron about every rank and vLLM about every slot.

    Raises:
        UnsupportedModel: an engine does with a tensor what cannot be planned.
    """
    assert recipe.rollout is not None, "checked when the recipe was read"
    shapes = expected_shapes(config)
    whole = len(shapes) * recipe.world_size <= WHOLE_PLAN
    standing = None if whole else standing_layers(config, recipe.train)
    say(f"asking Megatron what {recipe.world_size} ranks hold")
    holdings = holdings_of_all(config, recipe, standing)
    say(f"asking vLLM what {recipe.rollout.tp * recipe.rollout.dp} ranks of an engine want")
    slots = demand_of_slots(config, recipe, shapes, standing)
    held = {piece.name for _, side in distinct(holdings) for piece in side.pieces}
    times = {name: standing.get(layer_of(name), 1) if standing else 1 for name in held}
    check_same_tensors(groups_of(holdings), groups_of(dict(enumerate(one.demand for one in slots))))
    return Sides(shapes, holdings, slots, times, whole)
