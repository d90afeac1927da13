"""Checks a model against a recipe: its family, its config as transformers reads it, and the layouts."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version

from hybrid3d import installed_version
from hybrid3d.config import ModelShape, Recipe, RecipeError, check_layout
from hybrid3d.families import family_of
from hybrid3d.inputs.models import check_against_transformers, read_config


def check_model(recipe: Recipe, planned: bool = False) -> dict[str, Any]:
    """Check that the model is of a supported family and fits the recipe's layouts; returns its config.

    Where the recipe is only `planned`, this machine's device does not matter.

    Raises:
        CheckpointError, UnsupportedModel, RecipeError: with all problems found.
    """
    config = read_config(recipe.model.path)
    family = family_of(config)
    check_against_transformers(Path(recipe.model.path) / "config.json", config, family)
    shape = ModelShape.of(config)
    check_layout(recipe, shape, device=None if planned else "cuda" if torch.cuda.is_available() else "cpu")
    _check_mtp(recipe, len(family.mtp_layers(config)))
    if not planned and torch.cuda.is_available():
        _check_transformer_engine(recipe)
        if shape.experts is not None:
            _check_marks_of_experts(recipe)
    return config


def _check_mtp(recipe: Recipe, layers: int) -> None:
    """Check that the model has the layers for multi-token prediction that the recipe trains."""
    coef = recipe.train.mtp_loss_coef
    if not coef or layers == 1:
        return
    setting, count = f"train.mtp_loss_coef={coef:g}", f"num_nextn_predict_layers={layers}"
    if layers == 0:
        problem = f"{setting}: this model has no layer for multi-token prediction ({count}): set 0"
    else:  # no checkpoint that is supported is published with several, so that they were not tested
        problem = f"{setting}: {count}, and not more than 1 layer for multi-token prediction is supported: set 0"
    raise RecipeError(recipe.name, [problem])


def _check_transformer_engine(recipe: Recipe) -> None:
    """Check that what only Transformer Engine has on GPUs is there: FP8, and an attention for context parallelism.

    The latter has no float32.
    """
    cp, fp8, dtype, problems = recipe.train.cp, recipe.train.fp8, recipe.model.dtype, []
    is_installed = importlib.util.find_spec("transformer_engine") is not None
    if fp8 != "none" and not is_installed:
        problems.append(
            f"train.fp8={fp8} needs Transformer Engine, which is not installed: install it, as Dockerfile does, or "
            "leave train.fp8 out"
        )
    if cp > 1 and not is_installed:
        problems.append(
            f"train.cp={cp}: on GPUs context parallelism needs the attention of Transformer Engine, which is not "
            "installed: install it, as Dockerfile does, or set train.cp=1"
        )
    if cp > 1 and dtype != "bfloat16":
        problems.append(
            f"train.cp={cp}: on GPUs context parallelism needs model.dtype=bfloat16, not {dtype}: set it, or train.cp=1"
        )
    if problems:
        raise RecipeError(recipe.name, problems)


def _check_marks_of_experts(recipe: Recipe) -> None:
    """Check that Megatron or Transformer Engine marks experts' weights as shards, or norms of gradients would be wrong.

    Megatron-Core does since 0.17; Transformer Engine does until 2.12 (comments in Megatron's `TEGroupedLinear`).
    """
    engine, megatron = installed_version("transformer-engine"), installed_version("megatron-core")
    if engine and megatron and Version(megatron) < Version("0.17") and Version(engine) >= Version("2.13"):
        raise RecipeError(
            recipe.name,
            [
                f"megatron-core {megatron} with transformer-engine {engine}: neither marks the weights of experts as "
                "shards, so that norms of gradients would be wrong without a word: install megatron-core 0.17 or newer "
                "(Python 3.12 or newer), or transformer-engine <2.13"
            ],
        )
