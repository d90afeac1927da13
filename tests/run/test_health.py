"""Tests what a guard accepts, reports and does, with given metrics."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from hybrid3d.config import Recipe, load_recipe
from hybrid3d.config.sections.learning import Guard as Settings
from hybrid3d.rl.kl import KlController
from hybrid3d.run.health import MIN_GRAD_NORMS, Guard, TooManyInterventions
from hybrid3d.run.logger import RunLogger


class Events:
    """A fake `RunLogger` that stores events."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.said: list[str] = []

    def event(self, event: str, said: str = "", **fields: Any) -> None:
        self.events.append((event, fields))
        self.said.append(said)


RECIPE = load_recipe(Path(__file__).parents[2] / "recipes/demo-cpu.yaml", ["optimizer.clip_grad=0.5"])


def guard_of(**settings: Any) -> tuple[Watched, Events]:
    events, recipe = Events(), replace(RECIPE, guard=Settings(**settings))
    return Watched(Guard(cast(RunLogger, events)), recipe), events


class Watched:
    """A guard, called with one recipe."""

    def __init__(self, guard: Guard, recipe: Recipe):
        self._guard, self.recipe = guard, recipe

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._guard, name)
        return partial(found, recipe=self.recipe) if callable(found) and name != "restore" else found


def test_guard_never_accepts_a_gradient_norm_that_is_not_finite() -> None:
    guard, _ = guard_of()
    assert [guard.accepts_grad_norm(norm) for norm in (1.0, 1e30, math.nan, math.inf)] == [True, True, False, False]


def test_spike_is_by_the_median_of_what_was_allowed() -> None:
    guard, _ = guard_of(spike=3.0)
    norms = [1.0, 100.0, 2.0, 3.0, 2.5]
    assert len(norms) == MIN_GRAD_NORMS
    assert all(guard.accepts_grad_norm(norm) for norm in norms)  # as long as nothing is usual
    assert guard.accepts_grad_norm(7.5)  # three times the median of those, 2.5; after it the median is 2.75
    assert not guard.accepts_grad_norm(8.26)
    assert guard.accepts_grad_norm(8.25)


def test_steps_that_teach_nothing_make_no_spike_of_the_next() -> None:
    """Their norms are 0 or close to 0; norms up to `clip_grad` are never spikes."""
    guard, _ = guard_of(spike=2.0)
    assert all(guard.accepts_grad_norm(0.0) for _ in range(2 * MIN_GRAD_NORMS))
    assert guard.accepts_grad_norm(100.0)
    guard, _ = guard_of(spike=2.0)
    assert all(guard.accepts_grad_norm(1e-7) for _ in range(MIN_GRAD_NORMS))
    assert not guard.accepts_grad_norm(0.51)
    assert all(guard.accepts_grad_norm(0.5) for _ in range(2 * MIN_GRAD_NORMS))
    assert guard.accepts_grad_norm(0.99)


def test_critics_norms_are_its_own() -> None:
    guard, _ = guard_of(spike=2.0)
    assert all(
        guard.accepts_grad_norm(1.0) and guard.accepts_grad_norm(100.0, model="critic") for _ in range(MIN_GRAD_NORMS)
    )
    resumed, _ = guard_of(spike=2.0)
    resumed.restore(guard.progress)
    for one in (guard, resumed):
        assert not one.accepts_grad_norm(100.0)
        assert one.accepts_grad_norm(150.0, model="critic")
        assert not one.accepts_grad_norm(250.0, model="critic")


def test_critic_is_compared_with_its_own_clip_grad() -> None:
    guard, _ = guard_of(spike=2.0)
    guard.recipe = replace(
        guard.recipe, critic=replace(RECIPE.critic, optimizer=replace(RECIPE.optimizer, clip_grad=5.0))
    )
    for model, limit in (("policy", 0.5), ("critic", 5.0)):
        assert all(guard.accepts_grad_norm(1e-7, model=model) for _ in range(MIN_GRAD_NORMS))
        assert not guard.accepts_grad_norm(limit + 0.01, model=model)
        assert guard.accepts_grad_norm(limit, model=model)


def test_resumed_guard_goes_on() -> None:
    guard, _ = guard_of(spike=2.0, max_interventions=1)
    assert all(guard.accepts_grad_norm(1.0) for _ in range(MIN_GRAD_NORMS))
    guard.record_skip(4, math.nan)
    resumed, _ = guard_of(spike=2.0, max_interventions=1)
    resumed.restore(guard.progress)
    assert not resumed.accepts_grad_norm(2.1)
    with pytest.raises(TooManyInterventions):
        resumed.record_skip(5, 2.1)


def test_guard_stops_after_one_act_too_many() -> None:
    guard, events = guard_of(max_interventions=1)
    guard.record_skip(3, math.nan)
    message = (
        r"^step 4: the critic's gradient norm 50 is a spike: its batch is skipped; "
        r"guard\.max_interventions=1 is exceeded$"
    )
    with pytest.raises(TooManyInterventions, match=message):
        guard.record_skip(4, 50.0, model="critic")
    assert [(name, e["step"], e["interventions"], e["norm"], e["of"]) for name, e in events.events] == [
        ("batch_skipped", 3, 1, "nan", "policy"),
        ("batch_skipped", 4, 2, "50.0", "critic"),
    ]


@pytest.mark.parametrize("kl", [10.1, math.inf, math.nan])
def test_kl_that_explodes_fixes_its_coefficient(kl: float) -> None:
    guard, events = guard_of(kl_explosion=10.0)
    guard.recipe = replace(guard.recipe, algorithm=replace(RECIPE.algorithm, kl=replace(RECIPE.algorithm.kl, coef=0.1)))
    control = KlController(coef=0.5, target=1.0)
    guard.freeze_kl_coef(7, 10.0, control)
    assert (control.coef, control.target) == (0.5, 1.0)
    guard.freeze_kl_coef(8, kl, control)
    assert (control.coef, control.target) == (0.1, None)
    control.observe(50.0, answers=100)
    guard.freeze_kl_coef(9, kl, control)  # once is enough
    assert control.coef == 0.1
    assert [name for name, _ in events.events] == ["kl_fixed"]


def test_bound_is_told_once_when_it_is_left() -> None:
    guard, events = guard_of(max_grad_norm=2.0, min_entropy=0.5)
    times = {"sync/exposed_seconds": 0.1, "time/step": 1.0}
    for step, (norm, entropy) in enumerate([(1.0, 0.6), (3.0, 0.6), (4.0, 0.4), (2.0, 0.4), (math.nan, 0.5)]):
        guard.check_bounds({"step": step, "train/grad_norm": norm, "train/entropy": entropy, **times}, memory_gb=1.0)
    told = [(e["step"], e["metric"]) for _, e in events.events]
    assert told == [(1, "train/grad_norm"), (2, "train/entropy"), (4, "train/grad_norm")]
    assert events.said[0].startswith("step 1: train/grad_norm 3 violates guard.max_grad_norm=2: lower optimizer.lr")
