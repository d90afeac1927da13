"""Scales a recipe's model down, with the same layouts, for a machine that is too small for it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hybrid3d.config import ModelShape, Recipe, RecipeError, check_layout
from hybrid3d.families import Config, UnsupportedModel
from hybrid3d.inputs.models import read_config

# Sizes that are proportional to the hidden size. Those of latent attention stay, because they are not sharded.
WIDTHS = ("intermediate_size", "moe_intermediate_size", "num_attention_heads", "num_key_value_heads")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
PER_LAYER_KEYS = ("layer_types", "mlp_layer_types")  # lists with an entry per layer
VOCABULARY = 128  # the vocabulary size is rounded to a multiple of it
MAX_TRIED = 16_384  # sizes that are tried to find the smallest valid one


@dataclass(frozen=True)
class Scale:
    """The sizes to replace in the recipe's model; None keeps a size."""

    layers: int | None = None
    hidden: int | None = None
    experts: int | None = None

    def describe(self, config: Config) -> str:
        """Describe the sizes that were scaled, with their old and new values."""
        changes = {
            "layers": (config["num_hidden_layers"], self.layers),
            "hidden size": (config["hidden_size"], self.hidden),
            "experts": (next((config[key] for key in EXPERTS if key in config), None), self.experts),
        }
        said = [f"{what} {old} -> {new}" for what, (old, new) in changes.items() if new not in (None, old)]
        return ", ".join(said) or "nothing"


def scale_recipe(recipe: Recipe, scale: Scale, changed: float | None = None) -> tuple[Recipe, dict[str, Any]]:
    """Return the recipe of the benchmark, and its model's config, to be written to the recipe's `model.path`.

    The settings of generation (KV cache, lengths) are as small as possible. If syncs send only the fraction `changed`
    of the elements, vLLM keeps its weights, and on a CPU keeps them as they are loaded, because otherwise it packs
    nearly all of them.

    Raises:
        RecipeError: a size is invalid (the message has the smallest valid one), or the model does not fit the layouts.
    """
    config, rollout = read_config(recipe.model.path), recipe.rollout
    if rollout is None:
        raise RecipeError(recipe.name, ["the recipe has no `rollout` section: there is no sync to measure"])
    if changed is not None:
        _check_changed(recipe, changed)
        cpu = not torch.cuda.is_available()
        sleep = rollout.sleep and recipe.is_split  # ranks that only generate never sleep
        rollout = replace(rollout, sleep=sleep, pack_weights=rollout.pack_weights and not cpu)
        recipe = replace(recipe, sync=replace(recipe.sync, delta="always"))
    name = f"bench-{recipe.name}"
    smaller = replace(
        recipe,
        name=name,
        lora=None,  # the model's own weights are synced
        model=replace(recipe.model, path=str(Path(recipe.run.dir) / name / "model")),
        rollout=replace(rollout, max_model_len=128, max_new_tokens=8, kv_cache_gib=1 / 16),
    ).without_reward_ranks()
    fits = not list(_problems(config, smaller, scale))
    for key in () if fits else vars(scale):  # which of the sizes does not fit by itself
        value = getattr(scale, key)
        problems = [] if value is None else list(_problems(config, smaller, Scale(**{key: value})))
        if problems:
            best = _smallest(config, smaller, key)
            fix = f"--{key} {best} is the smallest that works" if best else f"no --{key} works with these layouts"
            raise RecipeError(recipe.name, [f"--{key} {value}: {'; '.join(problems)}: {fix}"])
    found = _scaled_config(config, scale)
    check_layout(smaller, ModelShape.of(found), device=None)
    return smaller, found


def _check_changed(recipe: Recipe, changed: float) -> None:
    option = f"--changed {changed}"
    if not 0 < changed <= 1:
        raise RecipeError(recipe.name, [f"{option}: expected a fraction above 0 and up to 1"])
    if recipe.model.dtype != "bfloat16":
        raise RecipeError(recipe.name, [f"{option}: model.dtype is {recipe.model.dtype}: set model.dtype=bfloat16"])
    if recipe.sync.delta == "never":
        raise RecipeError(recipe.name, [f"{option}: sync.delta is never: leave it out"])


def write_model(recipe: Recipe, config: Config) -> None:
    """Write the config to `model.path`, where the engines read it."""
    folder = Path(recipe.model.path)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _scaled_config(config: Config, scale: Scale) -> dict[str, Any]:
    found = dict(config)
    if scale.layers:
        found["num_hidden_layers"] = scale.layers
        for key in PER_LAYER_KEYS:
            if isinstance(config.get(key), list):
                found[key] = [config[key][layer % len(config[key])] for layer in range(scale.layers)]
        if config.get("max_window_layers") is not None:
            found["max_window_layers"] = min(config["max_window_layers"], scale.layers)
        if config.get("mlp_only_layers"):
            found["mlp_only_layers"] = [layer for layer in config["mlp_only_layers"] if layer < scale.layers]
        if "first_k_dense_replace" in config:  # at least one layer must be sparse
            found["first_k_dense_replace"] = min(config["first_k_dense_replace"], scale.layers - 1)
    if scale.hidden:
        found["hidden_size"] = scale.hidden
        for key in WIDTHS:
            if isinstance(config.get(key), int):
                found[key] = config[key] * scale.hidden // config["hidden_size"]
        tokens = config["vocab_size"] * scale.hidden // config["hidden_size"]
        found["vocab_size"] = -(-tokens // VOCABULARY) * VOCABULARY
        found |= dict.fromkeys((key for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config), 0)
    for key in EXPERTS:
        if scale.experts and key in config:
            found[key] = scale.experts
            found["num_experts_per_tok"] = min(config["num_experts_per_tok"], scale.experts)
    return found


def _problems(config: Config, recipe: Recipe, scale: Scale) -> Iterator[str]:
    """Yield the problems of the model that is scaled to these sizes."""
    if any(value is not None and value < 1 for value in vars(scale).values()):
        yield "it must be 1 or more"
        return
    if scale.experts and not any(key in config for key in EXPERTS):
        yield "the model has no experts"
        return
    if scale.hidden:
        sizes = {key: config[key] * scale.hidden for key in WIDTHS if isinstance(config.get(key), int)}
        unfit = {key: size / config["hidden_size"] for key, size in sizes.items() if size % config["hidden_size"]}
        yield from (f"{key} would be {size:.2f}" for key, size in unfit.items())
        if unfit:
            return
    if scale.layers is not None and scale.layers <= (1 if config.get("first_k_dense_replace") else 0):
        yield "it takes a layer of each kind"
        return
    try:
        check_layout(recipe, ModelShape.of(_scaled_config(config, scale)), device=None)
    except RecipeError as error:
        yield from error.problems
    except UnsupportedModel as error:
        yield str(error)


def _smallest(config: Config, recipe: Recipe, key: str) -> int | None:
    most = {"layers": "num_hidden_layers", "hidden": "hidden_size"}.get(key)
    most = most or next((name for name in EXPERTS if name in config), None)
    for value in range(1, min(config[most], MAX_TRIED) + 1) if most else ():
        if not list(_problems(config, recipe, Scale(**{key: value}))):
            return value
    return None
