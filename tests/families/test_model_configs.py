"""The architecture configs of recipes/models: transformers and Megatron build them, with the published parameters."""

from __future__ import annotations

import functools
import json
import math
import re
from pathlib import Path

import pytest
import torch
from transformers.core_model_loading import revert_weight_conversion

from checkpoints import skeleton_of

MODELS = Path(__file__).resolve().parents[2] / "recipes" / "models"
TABLE = re.findall(r"^\| `(\S+)` \|.*?\| ([\d,]+) \|", (MODELS / "README.md").read_text(), re.MULTILINE)
PUBLISHED = {folder: int(parameters.replace(",", "")) for folder, parameters in TABLE}


@functools.cache
def shapes_in_transformers(folder: str) -> dict[str, tuple[int, ...]]:
    """Each tensor of the checkpoint that transformers would save: in memory it fuses the experts of a layer."""
    kind, config = skeleton_of(MODELS / folder)
    with torch.device("meta"):
        model = kind(config)
        saved = revert_weight_conversion(model, model.state_dict())
    return {name: tuple(tensor.shape) for name, tensor in saved.items()}


def test_model_configs_are_all_in_the_table() -> None:
    assert PUBLISHED.keys() == {path.parent.name for path in MODELS.glob("*/config.json")}
    assert {path.name for path in MODELS.rglob("*") if path.is_file()} == {"README.md", "config.json"}


# The numbers stand in the README: the hub's count of each checkpoint's safetensors, for DeepSeek-V3 that of
# arXiv 2412.19437 (671B without the layer that predicts further tokens); those of GLM-4.5-Air and Kimi-K2 are
# transformers' own.
@pytest.mark.parametrize("folder", PUBLISHED)
def test_model_config_has_the_published_parameters(folder: str) -> None:
    assert sum(math.prod(shape) for shape in shapes_in_transformers(folder).values()) == PUBLISHED[folder]


@pytest.mark.engines
@pytest.mark.parametrize("folder", PUBLISHED)
def test_megatron_expects_the_tensors_of_transformers(folder: str) -> None:
    from hybrid3d.train.megatron.probe import expected_shapes

    config = json.loads((MODELS / folder / "config.json").read_text())
    assert expected_shapes(config) == shapes_in_transformers(folder)
