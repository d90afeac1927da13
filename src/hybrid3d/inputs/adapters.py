"""Adapters (LoRA) as files in PEFT's format: checks of those that a run begins with, and what an export consists of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hybrid3d.config import Lora, Recipe, RecipeError
from hybrid3d.families import Config, adapter_names, can_be_adapted, family_of, is_adapted, is_expert, module_of
from hybrid3d.inputs.models import read_config
from hybrid3d.reshard.file_index import ADAPTER_FILE, CheckpointError, read_shapes
from hybrid3d.reshard.plan.layout import Shape
from hybrid3d.storage.user_files import read_json_file

ADAPTER_CONFIG = "adapter_config.json"
MATRICES_SHOWN = 4  # in a message

# What PEFT's config may have besides, which would compute something else, and the value without effect
_OTHER_KINDS: dict[str, Any] = {"use_dora": False, "use_rslora": False, "bias": "none", "fan_in_fan_out": False}


def model_shapes(path: str, config: Config) -> dict[str, Shape]:
    """Return the shape of each tensor of a checkpoint, without layers for multi-token prediction."""
    return family_of(config).without_mtp(read_shapes(path), config)


def adapted_shapes(lora: Lora, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return the shape of each matrix of a model's adapters, by its name in PEFT's files; `shapes`: the model's."""
    found: dict[str, Shape] = {}
    for name, shape in shapes.items():
        if is_adapted(name, len(shape), lora.target_modules):
            a, b = adapter_names(name)
            found |= {a: (lora.rank, shape[1]), b: (shape[0], lora.rank)}
    return found


def check_adapters(recipe: Recipe) -> None:
    """Check the recipe's adapters as `check_adapted_layers` does, and the files that they begin with.

    Raises:
        RecipeError: the files have adapters of another rank, scale or kind.
        CheckpointError: the files cannot be read, or have other matrices.
    """
    shapes = model_shapes(recipe.model.path, read_config(recipe.model.path))
    check_adapted_layers(recipe, shapes)
    lora = recipe.lora
    if lora is not None and lora.path is not None:
        problems = [*_other_settings(lora, lora.path)]
        if problems:
            raise RecipeError(recipe.name, problems)
        _check_matrices(lora.path, adapted_shapes(lora, shapes))


def check_adapted_layers(recipe: Recipe, shapes: Mapping[str, Shape]) -> None:
    """Check that a model with these tensors has the layers of the recipe's adapters.

    Raises:
        RecipeError: a layer is not there, or adapters of it cannot be synced as `lora.sync` says.
    """
    assert recipe.lora is not None, "called where the recipe has adapters"
    problems = [*_problems(recipe.lora, shapes, recipe.syncs_adapters and recipe.rollout is not None)]
    if problems:
        raise RecipeError(recipe.name, problems)


def _problems(lora: Lora, shapes: Mapping[str, Shape], needs_slots: bool) -> Iterator[str]:
    layers = sorted({module_of(name) for name, shape in shapes.items() if can_be_adapted(name, len(shape))})
    adapted = [name for name, shape in shapes.items() if is_adapted(name, len(shape), lora.target_modules)]
    unknown = sorted(set(lora.target_modules or ()) - set(layers))
    if unknown:
        yield f"lora.target_modules: this model has no linear layer {', '.join(unknown)}: it has {', '.join(layers)}"
    elif not adapted:
        yield f"lora.target_modules: names no layer: this model has {', '.join(layers)}"
    if not needs_slots:
        return
    without_slots = sorted({module_of(n) for n in adapted if is_expert(n) or module_of(n) == "kv_b_proj"})
    if without_slots:
        others = sorted(set(layers) - set(without_slots))
        yield (
            f"lora.sync=adapter: adapters of {', '.join(without_slots)}, which are in this model's experts or latent "
            f"attention, are not sent to slots of vLLM's: set lora.sync=merged, or "
            f"lora.target_modules=[{', '.join(others)}]"
        )


def _other_settings(lora: Lora, path: str) -> Iterator[str]:
    """Yield where PEFT's config differs from the recipe."""
    file = Path(path) / ADAPTER_CONFIG
    try:
        config = read_json_file(file)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from None
    kind = config.get("peft_type") if isinstance(config, dict) else None
    if kind != "LORA":
        yield f"lora.path={path}: its {ADAPTER_CONFIG} has peft_type {kind}: only LORA is supported"
        return
    for key, setting, value in (("r", "rank", lora.rank), ("lora_alpha", "alpha", lora.alpha)):
        if config.get(key) != value:
            yield f"lora.{setting}={value:g}: {file} has {key}={config.get(key)}: set lora.{setting}={config.get(key)}"
    for key, value in _OTHER_KINDS.items():
        if config.get(key, value) not in (value, None):
            yield f"lora.path={path}: {key}={config[key]} in its {ADAPTER_CONFIG} is not supported: only {value} is"
    initial = config.get("init_lora_weights", True)
    if not (initial is None or isinstance(initial, bool) or initial == "gaussian"):  # others change the model's weights
        yield f"lora.path={path}: init_lora_weights={initial} in its {ADAPTER_CONFIG} is not supported: convert to LoRA"
    for key in ("alora_invocation_tokens", "rank_pattern", "alpha_pattern", "modules_to_save"):
        if config.get(key):
            yield f"lora.path={path}: {key} in its {ADAPTER_CONFIG} is not supported: it must be empty"


def _check_matrices(path: str, wanted: Mapping[str, Shape]) -> None:
    found = read_shapes(path, ADAPTER_FILE)
    missing, more = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
    file = Path(path) / ADAPTER_FILE
    if missing or more:
        names = missing or more
        which = "lacks matrices that lora.target_modules selects" if missing else "has matrices that it does not select"
        raise CheckpointError(f"{file} {which}, {len(names)} of them: {', '.join(names[:MATRICES_SHOWN])}")
    for name, shape in wanted.items():
        if found[name] != shape:
            raise CheckpointError(f"{file}: {name} has shape {list(found[name])}, and this model needs {list(shape)}")


def adapter_config(lora: Lora, base: str, names: Mapping[str, Any]) -> dict[str, Any]:
    """Return PEFT's config of adapters with matrices of these names; `base` is the path of their model."""
    modules = {module_of(name.rsplit(".lora_", 1)[0]) for name in names}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": sorted(modules),
        "lora_dropout": 0.0,
        "inference_mode": True,
        **_OTHER_KINDS,
    }
