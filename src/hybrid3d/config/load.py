"""Reads a `Recipe` from YAML and overrides, and reports all problems in one error."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from hybrid3d.config.former import with_present_settings
from hybrid3d.config.overrides import apply_overrides
from hybrid3d.config.recipe import Recipe
from hybrid3d.config.rules import validate_recipe
from hybrid3d.config.schema import RecipeError, read_section, read_yaml, to_raw


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read and validate a recipe.

    Args:
        overrides: settings as `section.key=value`, the value in YAML.

    Raises:
        RecipeError: with all problems.
    """
    return _overridden(read_yaml(Path(path)), overrides, str(path))


def with_overrides(recipe: Recipe, overrides: Sequence[str]) -> Recipe:
    """Return a recipe with these settings, given as for `load_recipe`, replaced.

    Raises:
        RecipeError: with all problems.
    """
    return _overridden(to_raw(recipe), overrides, recipe.name)


def _overridden(raw: dict[Any, Any], overrides: Sequence[str], subject: str) -> Recipe:
    problems: list[str] = []
    apply_overrides(raw, overrides, problems)
    return read_recipe(raw, subject, problems)


def read_recipe(raw: object, subject: str, problems: list[str]) -> Recipe:
    """Return the validated recipe of parsed YAML.

    Args:
        subject: what the error message is about, such as the file's path.
        problems: problems found so far, which the error includes.

    Raises:
        RecipeError: with all problems.
    """
    present = with_present_settings(raw, problems) if isinstance(raw, dict) else raw
    recipe = read_section(Recipe, present, "", problems)
    if recipe is not None:
        problems.extend(refusal.message for refusal in validate_recipe(recipe))
    if recipe is None or problems:
        raise RecipeError(subject, problems)
    return recipe


def load_derived(path: str | Path) -> Recipe:
    """Read a recipe that this program has derived from a valid one, whose settings may contradict each other.

    Raises:
        RecipeError: with all values that no recipe has.
    """
    problems: list[str] = []
    recipe = read_section(Recipe, read_yaml(Path(path)), "", problems)
    if recipe is None:
        raise RecipeError(str(path), problems)
    return recipe


def recipe_to_yaml(recipe: Recipe) -> str:
    """Return the recipe as YAML with all defaults written out; `load_recipe` reads an equal recipe from it."""
    return str(yaml.safe_dump(to_raw(recipe), sort_keys=False, allow_unicode=True))
