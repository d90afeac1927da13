"""The nearest layouts that fit, for a recipe that does not."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from hybrid3d.config import ModelShape, Recipe, RecipeError, Train, check_layout
from hybrid3d.families import Config, family_of
from hybrid3d.planning.hardware import hardware_of
from hybrid3d.planning.memory import Held, Memory, memory_of
from hybrid3d.reshard.classes import distinct
from hybrid3d.reshard.layout import Holdings
from hybrid3d.reshard.stamp import layer_of
from hybrid3d.rollout.probe import Asked, demand_of_slots
from hybrid3d.train.probe import expected_shapes, holdings_of_all, standing_layers

OFFERED = 3


def nearest_that_fit(recipe: Recipe, config: Config) -> list[str]:
    """Up to three ways to make a recipe fit, as overrides, fewest changes first."""
    found: list[str] = []
    asked = _Asked(config)
    for changes in _changes(recipe):
        changed = _changed(recipe, changes)
        if _is_valid(changed, config) and not asked.memory(changed).problems():
            found.append(" ".join(f"{key}={value}" for key, value in changes.items()))
            if len(found) == OFFERED:
                break
    return found


def _changes(recipe: Recipe) -> Iterator[dict[str, object]]:
    """One change, then two together: those that cost nothing before those that cost speed, more GPUs last."""
    train, rollout = recipe.train, recipe.rollout
    assert rollout is not None
    single: list[dict[str, object]] = []
    if train.recompute == "none":
        single.append({"train.recompute": "full"})
    if train.micro_batch_size > 1:
        single.append({"train.micro_batch_size": train.micro_batch_size // 2})
    single += [{"rollout.memory_fraction": f} for f in (0.3, 0.4, 0.5, 0.6, 0.7) if f != rollout.memory_fraction]
    single += [{"rollout.tp": rollout.tp * n} for n in (2, 4)]
    single += [{"train.ep": train.ep * n} for n in (2, 4, 8)] if train.ep > 1 else []
    single += [{"train.pp": train.pp * 2, "train.dp": train.dp // 2}] if train.dp % 2 == 0 else []
    single += [{"train.tp": train.tp * 2, "train.dp": train.dp // 2}] if train.dp % 2 == 0 else []
    single += [{"train.dp": train.dp * n} for n in (2, 4)]
    single += [{"machine.kind": "h200-8x400g"}] if recipe.machine.kind != "h200-8x400g" else []
    yield from single
    for one, other in itertools.combinations(single, 2):
        if not one.keys() & other.keys():
            yield one | other


def _changed(recipe: Recipe, changes: dict[str, object]) -> Recipe:
    for key, value in changes.items():
        section, _, name = key.partition(".")
        part = dataclasses.replace(getattr(recipe, section), **{name: value})
        recipe = dataclasses.replace(recipe, **{section: part})
    return recipe


def _is_valid(recipe: Recipe, config: Config) -> bool:
    family = family_of(config)
    try:
        check_layout(
            recipe, ModelShape.from_config(config, family.experts(config), family.latents(config)), device=None
        )
    except RecipeError:
        return False
    return True


class _Asked:
    """The memory of recipes of one model; each engine is asked about a layout once, and about as little as says it."""

    def __init__(self, config: Config):
        self._config = config
        self._shapes = expected_shapes(config)
        self._held: dict[Train, Held] = {}
        self._wanted: dict[tuple[int, int, bool], tuple[Asked, int]] = {}

    def memory(self, recipe: Recipe) -> Memory:
        layout, rollout = dataclasses.replace(recipe.train, micro_batch_size=1, recompute="none"), recipe.rollout
        assert rollout is not None
        if layout not in self._held:
            standing = standing_layers(self._config, layout)
            holdings = holdings_of_all(self._config, recipe, standing)
            self._held[layout] = Held.of(holdings, _times(standing, holdings))
        slots = rollout.tp, rollout.dp, rollout.expert_parallel
        if slots not in self._wanted:
            standing = standing_layers(self._config, Train())
            first = demand_of_slots(self._config, recipe, self._shapes, standing, first_only=True)[0]
            nbytes = sum(piece.nbytes * standing.get(layer_of(piece.name), 1) for piece in first.demand.pieces)
            self._wanted[slots] = first, nbytes
        return memory_of(recipe, self._config, hardware_of(recipe.machine), self._held[layout], *self._wanted[slots])


def _times(standing: dict[int, int], holdings: dict[int, Holdings]) -> dict[str, int]:
    names = {piece.name for _, side in distinct(holdings) for piece in side.pieces}
    return {name: standing.get(layer_of(name), 1) for name in names}
