"""Reads recipes: YAML and overrides in, a `Recipe` out, or one error that lists everything that is wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import yaml

from hybrid3d.config.recipe import Recipe
from hybrid3d.config.rules import validate_recipe
from hybrid3d.config.schema import RecipeError, apply_overrides, read_section, read_yaml


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
        problems.extend(validate_recipe(recipe))
    if recipe is None or problems:
        raise RecipeError(subject, problems)
    return recipe


def recipe_to_yaml(recipe: Recipe) -> str:
    """The recipe with every default written out; `load_recipe` reads an equal one from it."""
    return str(yaml.safe_dump(dataclasses.asdict(recipe), sort_keys=False, allow_unicode=True))
