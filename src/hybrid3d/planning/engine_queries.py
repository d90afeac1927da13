"""Queries both engines about all ranks of a recipe's layouts, on the meta device, and places ranks by them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hybrid3d.config import Recipe
from hybrid3d.families import Config, is_quantized
from hybrid3d.reshard.fp8 import quantized_holdings, quantized_shapes
from hybrid3d.reshard.plan.classes import (
    TensorClass,
    classify_tensors,
    group_ranks,
    layer_of,
    rank_groups,
    signature_of,
)
from hybrid3d.reshard.plan.coverage import check_same_tensors
from hybrid3d.reshard.plan.layout import Demand, Holdings, Shape
from hybrid3d.reshard.plan.placement import MissingBytes, assign_slots, consecutive_slots, count_missing_bytes
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


@dataclass(frozen=True)
class Placement:
    """The slot of each rank, and the counts that it was chosen by.

    Attributes:
        slots: numbered over all engines.
        missing: the bytes that these ranks, and their nodes, lack of what each slot wants.
        holders: the ranks of each group of ranks that hold the same pieces.
        first: the first rank that generates.
    """

    slots: np.ndarray
    missing: MissingBytes
    classes: Sequence[TensorClass]
    holders: Sequence[Sequence[int]]
    first: int

    def readers(self, slots: int) -> list[list[int]]:
        """Return for each of the `slots` slots of an engine the ranks that have it, one in each engine."""
        return [(self.first + np.flatnonzero(self.slots % slots == slot)).tolist() for slot in range(slots)]

    def demand(self, wanted: Sequence[Demand]) -> dict[int, Demand]:
        """Return what each rank wants, from what each slot of an engine wants."""
        return {self.first + i: wanted[slot % len(wanted)] for i, slot in enumerate(self.slots)}


def compute_placement(recipe: Recipe, answers: EngineAnswers) -> Placement:
    """Return the placement that `debug.placement` selects: of least bytes, or in rank order."""
    assert recipe.rollout is not None, "checked when the recipe was read"
    world, per_node = recipe.sync_ranks, recipe.machine.gpus_per_node
    groups = rank_groups(answers.holdings)
    holders = [ranks for ranks, _ in groups]
    readers = [signature_of(slot.demand) for slot in answers.slots]
    classes = classify_tensors([signature for _, signature in groups], readers, answers.multiplicity)
    generating = recipe.role_ranks["generation"]
    first, without = generating.start, [generating] if recipe.is_split else []
    missing = count_missing_bytes(classes, [*holders, *without], len(readers), world, per_node)
    missing = replace(missing, group=missing.group[first:], node=missing.node[first:])
    if recipe.debug.placement == "overlap" and not recipe.is_split:
        slots = assign_slots(missing, len(readers), recipe.rollout.tp, per_node)
    else:
        slots = consecutive_slots(recipe.generation_ranks)
    return Placement(slots, missing, classes, holders, first)
