"""A recipe: YAML in, frozen dataclasses out, and every mistake in it answered at once, before anything starts.

`load_recipe` checks what the file alone can tell, `check_layout` (in `shape.py`) how the recipe fits a model; both list
all that is wrong in one `RecipeError`. Standard library and yaml only, so that the command line answers fast.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from hybrid3d.contradictions import contradictions
from hybrid3d.schema import Name, RecipeError, Schedule, apply_overrides, read_section, read_yaml
from hybrid3d.sections.engines import OFFLOADS, Machine, Model, Rollout, Sync, Train
from hybrid3d.sections.learning import Algorithm, Correction, Critic, Data, Guard, Kl, Optimizer, Reward, Run
from hybrid3d.shape import ModelShape, check_layout, check_layout_early

__all__ = [
    "OFFLOADS",
    "Algorithm",
    "Correction",
    "Critic",
    "Data",
    "Guard",
    "Kl",
    "Machine",
    "Model",
    "ModelShape",
    "Optimizer",
    "Recipe",
    "RecipeError",
    "Reward",
    "Rollout",
    "Run",
    "Sync",
    "Train",
    "check_layout",
    "check_layout_early",
    "load_recipe",
    "read_recipe",
    "recipe_to_yaml",
]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All settings of a run, and those that change at a step. Only `sft` may do without `rollout`."""

    name: Name
    model: Model
    train: Train = Train()
    rollout: Rollout | None = None
    sync: Sync = Sync()
    data: Data
    reward: Reward = Reward()
    algorithm: Algorithm
    optimizer: Optimizer
    critic: Critic = Critic()
    guard: Guard = Guard()
    run: Run
    schedule: Schedule = field(default_factory=dict, hash=False)
    machine: Machine = Machine()

    @property
    def world_size(self) -> int:
        """Ranks in all; EP and ETP regroup these ranks and add none."""
        return self.train.tp * self.train.pp * self.train.cp * self.train.dp

    @property
    def sequences_per_step(self) -> int:
        """Sequences that a step trains on, over all data-parallel ranks."""
        samples = self.algorithm.samples_per_prompt if self.algorithm.generates else 1
        return self.algorithm.prompts_per_step * samples


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe; each override is `section.key=value`, its value YAML. RecipeError lists everything wrong."""
    raw = read_yaml(Path(path))
    problems: list[str] = []
    apply_overrides(raw, overrides, problems)
    return read_recipe(raw, str(path), problems)


def read_recipe(raw: object, subject: str, problems: list[str]) -> Recipe:
    """A recipe from what its YAML says. RecipeError, about `subject`: the problems so far, and all that it has."""
    recipe = read_section(Recipe, raw, "", problems)
    if recipe is not None:
        problems.extend(contradictions(recipe))
    if recipe is None or problems:
        raise RecipeError(subject, problems)
    return recipe


def recipe_to_yaml(recipe: Recipe) -> str:
    """The recipe with every default written out; `load_recipe` reads an equal one from it."""
    return str(yaml.safe_dump(dataclasses.asdict(recipe), sort_keys=False, allow_unicode=True))
