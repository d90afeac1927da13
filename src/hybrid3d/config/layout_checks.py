"""Checks whether a recipe fits a model, and suggests values that would.

Every problem names the settings whose values could solve it. The values that a message suggests for a key have been
tried: with them, the recipe has no problem with that key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hybrid3d.config.layout_rules import (
    CPU_HEAD_DIMS,
    MAX_PROMPTS,
    STAGE_SETTINGS,
    Device,
    find_layout_problems,
    prompts_multiple,
)
from hybrid3d.config.model_shape import ModelShape
from hybrid3d.config.schema import MAX_RANKS, RecipeError
from hybrid3d.errors import UserMistake
from hybrid3d.storage.user_files import read_json_file

if TYPE_CHECKING:
    from hybrid3d.config.recipe import Recipe

MAX_TRIED_LAYERS = 1_000  # largest value of a pipeline setting that is tried as a suggestion


def check_layout(recipe: Recipe, model: ModelShape, *, device: Device | None) -> None:
    """Check that a recipe fits a model.

    If the train layout is invalid, checks that depend on its number of ranks are left out.

    Args:
        device: device type of the run, or None for planning, where limits of this machine do not matter.

    Raises:
        RecipeError: the recipe does not fit; with all problems and valid values.
    """
    problems = find_layout_problems(recipe, model, device)
    if problems:
        valid_values: dict[str, list[str]] = {}
        lines = []
        for problem in problems:
            for key in problem.keys if not problem.fix else ():
                if key not in valid_values:
                    valid_values[key] = _nearest_valid_values(recipe, model, device, key)
            lines.append(f"{problem.message}: {problem.fix or _suggestion(problem.keys, valid_values)}")
        raise RecipeError(f"recipe {recipe.name} does not fit its model", lines)


def _nearest_valid_values(recipe: Recipe, model: ModelShape, device: Device | None, key: str) -> list[str]:
    """Return the nearest smaller and larger values of a key that solve its problems, or `null` if only that does."""
    section, _, name = key.partition(".")
    if key == "head_dim":
        value, candidates = model.head_dim, [*CPU_HEAD_DIMS]
    else:
        value, candidates = getattr(getattr(recipe, section), name), _candidates(recipe, model, key)

    def is_valid(candidate: int | None) -> bool:
        if key == "head_dim":
            return True
        tried = replace(recipe, **{section: replace(getattr(recipe, section), **{name: candidate})})
        return not any(key in problem.keys for problem in find_layout_problems(tried, model, device))

    below = next((n for n in reversed(candidates) if n < value and is_valid(n)), None)
    above = next((n for n in candidates if n > value and is_valid(n)), None)
    nearest = [str(n) for n in (below, above) if n is not None]
    if not nearest and name in STAGE_SETTINGS and is_valid(None):
        return ["null"]
    return nearest


def _suggestion(keys: Sequence[str], valid_values: Mapping[str, Sequence[str]]) -> str:
    suggestions = [
        f"nearest valid {f'value of {key} is' if len(values) == 1 else f'values of {key} are'} {', '.join(values)}"
        for key in keys
        if (values := valid_values[key])
    ]
    return "; ".join(suggestions) or f"no value of {' or '.join(keys)} alone is valid here"


def _candidates(recipe: Recipe, model: ModelShape, key: str) -> list[int]:
    """Return the values of a key among which the valid ones are, ascending."""
    if key in ("train.tp", "rollout.tp"):
        return _divisors(model.num_attention_heads)
    if key in ("train.pp", "train.vpp") or key.endswith("_stage_layers"):
        return [*range(1, min(model.num_layers, MAX_TRIED_LAYERS) + 1)]
    if key == "train.ep" and model.experts is not None:
        return _divisors(model.experts.count)
    if key == "train.etp" and model.experts is not None:
        return _divisors(model.experts.width)
    if key == "train.cp" and recipe.rollout is not None:
        return sorted({1, *_divisors(recipe.rollout.max_model_len // 2)})
    if key == "rollout.max_model_len" and recipe.rollout is not None:
        step = 2 * recipe.train.cp
        return [*range(step, model.max_position_embeddings + 1, step)]
    if key == "rollout.dp":
        return _divisors(recipe.generation_ranks)
    if key == "algorithm.prompts_per_step":
        step, prompts = prompts_multiple(recipe), recipe.algorithm.prompts_per_step
        around = range(max(step, prompts // step * step), prompts + step + 1, step)
        return [n for n in around if n <= MAX_PROMPTS]
    return [1]


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, min(number, MAX_RANKS) + 1) if number % n == 0]


def check_layout_early(recipe: Recipe) -> None:
    """Run `check_layout` with the model's `config.json` only, without importing torch, so that it fails fast.

    Raises:
        UserMistake: the config cannot be read, no model family supports it, or the recipe does not fit it.
    """
    config = read_json_file(Path(recipe.model.path) / "config.json")
    try:
        shape = ModelShape.of(config)
    except UserMistake:
        raise
    except Exception:  # values of wrong types, which the full check of the checkpoint reports
        return
    check_layout(recipe, shape, device=None)
