"""Checks a model against a recipe: of a known family, read as transformers reads it, divisible as layouts need it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hybrid3d.config import ModelShape, Recipe, check_layout
from hybrid3d.families import family_of
from hybrid3d.inputs.models import check_against_transformers, read_config


def check_model(recipe: Recipe, planned: bool = False) -> dict[str, Any]:
    """The checkpoint's config, known to be of a known family and to fit the recipe's layouts.

    Args:
        planned: the recipe is not to run on this machine.

    Raises:
        CheckpointError, UnsupportedModel, RecipeError: with all that is wrong.
    """
    config = read_config(recipe.model.path)
    family = family_of(config)
    check_against_transformers(Path(recipe.model.path) / "config.json", config, family)
    shape = ModelShape.from_config(config, experts=family.experts(config), latents=family.latents(config))
    check_layout(recipe, shape, device=None if planned else "cuda" if torch.cuda.is_available() else "cpu")
    return config
