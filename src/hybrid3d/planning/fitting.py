"""Checks whether a recipe fits a GPU's memory, and otherwise finds the nearest layouts that do."""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from hybrid3d.config import Lora, ModelShape, Recipe, RecipeError, Train, check_layout
from hybrid3d.config.load import load_derived
from hybrid3d.config.rules import validate_recipe
from hybrid3d.families import Config
from hybrid3d.inputs.models import read_config
from hybrid3d.planning.engine_queries import ProgressCallback, synced_shapes
from hybrid3d.planning.hardware import MACHINES, hardware_of
from hybrid3d.planning.memory import (
    MemoryEstimate,
    ParameterCounts,
    count_parameters,
    estimate_memory,
    gb,
    max_over_stages,
)
from hybrid3d.process import kill_when_parent_exits
from hybrid3d.reshard.plan.classes import layer_of
from hybrid3d.rollout.probe import SlotDemand, slot_demands
from hybrid3d.train.megatron.probe import expected_shapes, holdings_of_all, mtp_holdings, representative_layer_counts

MAX_SUGGESTIONS = 3
LARGER = "h200-8x400g"  # the machine that is suggested for more memory


def check_memory(recipe: Recipe, config: Config, on_progress: ProgressCallback = lambda what: None) -> MemoryEstimate:
    """Return the memory of a recipe that fits its machine.

    Raises:
        RecipeError: the recipe does not fit; the message has the numbers and the nearest layouts that fit.
    """
    on_progress("asking both engines how much a rank holds")
    ask_memory = MemoryEstimator(config)
    memory = ask_memory(recipe)
    problems = memory.problems()
    if problems:
        most = ", ".join(f"{key.replace('_', ' ')} {gb(n)}" for key, n in max_over_stages(memory.stages).items())
        on_progress("looking for layouts that fit")
        near = [
            " ".join(f"{key}={value}" for key, value in changes.items()) for changes in _fitting(recipe, ask_memory)
        ]
        offer = "; ".join(near) if near else "none is one or two settings away: take more GPUs, or larger ones"
        problems += [f"the most that a rank has: {most}", f"nearest that fit: {offer}"]
        raise RecipeError(f"recipe {recipe.name} does not fit a GPU of {recipe.machine.kind}", problems)
    return memory


def _fitting(recipe: Recipe, ask_memory: MemoryEstimator) -> list[dict[str, object]]:
    """Return up to three minimal sets of changes that make a recipe fit, those with the fewest changes first."""
    found: list[dict[str, object]] = []
    for changes in _changes(recipe):
        if any(subset.items() <= changes.items() for subset in found):
            continue
        changed = _changed(recipe, changes)
        if ask_memory.is_valid(changed) and not ask_memory(changed).problems():
            found.append(changes)
            if len(found) == MAX_SUGGESTIONS:
                break
    return found


def _changes(recipe: Recipe) -> Iterator[dict[str, object]]:
    """Yield single changes, then pairs: first those that cost nothing, then those that cost speed, then more GPUs."""
    train, rollout = recipe.train, recipe.rollout
    assert rollout is not None
    single: list[dict[str, object]] = []
    if train.recompute == "none":
        single.append({"train.recompute": "full"})
    budget = train.max_tokens_per_micro_batch
    if budget is not None and budget // 2 >= rollout.max_model_len:
        single.append({"train.max_tokens_per_micro_batch": budget // 2})
    if budget is None and train.micro_batch_size > 1:
        single.append({"train.micro_batch_size": train.micro_batch_size // 2})
    single += [
        {"rollout.gpu_memory_utilization": f} for f in (0.3, 0.4, 0.5, 0.6, 0.7) if f != rollout.gpu_memory_utilization
    ]
    single += [{"rollout.tp": rollout.tp * n} for n in (2, 4)]
    single += [{"train.ep": train.ep * n} for n in (2, 4, 8)] if train.ep > 1 else []
    single += [{"train.pp": train.pp * 2, "train.dp": train.dp // 2}] if train.dp % 2 == 0 else []
    single += [{"train.tp": train.tp * 2, "train.dp": train.dp // 2}] if train.dp % 2 == 0 else []
    single += [{"train.cp": train.cp * n, "train.dp": train.dp // n} for n in (2, 4) if train.dp % n == 0]
    single += [{"train.dp": train.dp * n} for n in (2, 4)]
    if recipe.machine.memory_gb is None and hardware_of(recipe.machine).memory_bytes < MACHINES[LARGER].memory_bytes:
        single.append({"machine.kind": LARGER})
    yield from single
    for first, second in itertools.combinations(single, 2):
        if not first.keys() & second.keys():
            yield first | second


def _changed(recipe: Recipe, changes: dict[str, object]) -> Recipe:
    for key, value in changes.items():
        section, _, name = key.partition(".")
        part = dataclasses.replace(getattr(recipe, section), **{name: value})
        recipe = dataclasses.replace(recipe, **{section: part})
    return recipe


class MemoryEstimator:
    """Estimates the memory of recipes of one model; queries each engine once per layout, about one rank per stage."""

    def __init__(self, config: Config):
        self._config = config
        self._shapes = expected_shapes(config)
        self._held: dict[tuple[Train, Lora | None], list[ParameterCounts]] = {}
        self._wanted: dict[tuple[int, int, bool, bool], tuple[SlotDemand, int]] = {}

    def is_valid(self, recipe: Recipe) -> bool:
        try:
            check_layout(recipe, ModelShape.of(self._config), device=None)
        except RecipeError:
            return False
        return not any(validate_recipe(recipe))

    def __call__(self, recipe: Recipe) -> MemoryEstimate:
        layout, rollout = dataclasses.replace(recipe.train, micro_batch_size=1, recompute="none"), recipe.rollout
        assert rollout is not None
        key = layout, recipe.lora
        if key not in self._held:
            layer_counts = representative_layer_counts(self._config, layout)
            holdings = holdings_of_all(self._config, recipe, layer_counts, first_only=True)
            stage_ranks = recipe.train_ranks // layout.pp
            firsts = [holdings[stage * stage_ranks] for stage in range(layout.pp)]
            counted = partial(count_parameters, multiplicity=_multiplicity(layer_counts), lora=recipe.lora)
            self._held[key] = [counted(first.pieces) for first in firsts]
            if layout.mtp_loss_coef:
                further = count_parameters(mtp_holdings(self._config, recipe).pieces, lambda name: 1)
                self._held[key][-1] = dataclasses.replace(self._held[key][-1], mtp=further)
        slots = rollout.tp, rollout.dp, rollout.expert_parallel, recipe.quantizes
        if slots not in self._wanted:
            layer_counts = representative_layer_counts(self._config, Train())
            shapes = synced_shapes(recipe, self._shapes)
            first = slot_demands(self._config, recipe, shapes, layer_counts, first_only=True)[0]
            multiplicity = _multiplicity(layer_counts)
            nbytes = sum(piece.nbytes * multiplicity(piece.name) for piece in first.demand.pieces)
            self._wanted[slots] = first, nbytes
        hardware = hardware_of(recipe.machine)
        return estimate_memory(recipe, self._config, hardware, self._held[key], *self._wanted[slots])


def _multiplicity(layer_counts: Mapping[int, int]) -> Callable[[str], int]:
    counts = dict[int | None, int](layer_counts.items())
    return lambda name: counts.get(layer_of(name), 1)


if __name__ == "__main__":
    kill_when_parent_exits()
    recipe = load_derived(sys.argv[1])
    try:
        check_memory(recipe, read_config(recipe.model.path))
        Path(sys.argv[2]).write_text(json.dumps(None), encoding="utf-8")
    except RecipeError as misfit:
        Path(sys.argv[2]).write_text(json.dumps([misfit.subject, misfit.problems]), encoding="utf-8")
