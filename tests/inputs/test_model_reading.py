"""What we read of a `config.json` against what transformers reads of it: the same, or refused with both values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from checkpoints import FAMILIES, LLAMA3_ROPE, YARN, make_config, published, skeleton_of
from hybrid3d.errors import UserMistake
from hybrid3d.families import family_of, head_dim
from hybrid3d.inputs.models import check_against_transformers, read_config

NO_ROPE = {"rope_parameters": None}
SCALING = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}
OTHER = LLAMA3_ROPE | {"factor": 4.0}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
LEGACY_YARN = {"type": "yarn"} | {key: value for key, value in YARN.items() if key not in ("rope_type", "rope_theta")}


def written(folder: Path, family: str, changes: Mapping[str, Any]) -> Path:
    """A folder with the family's tiny config, changed."""
    config = make_config(family).to_dict()
    config["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[make_config(family).model_type]]
    config = {**config, **published(family), **changes}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def checked(folder: Path) -> dict[str, Any]:
    config = read_config(folder)
    check_against_transformers(folder / "config.json", config, family_of(config))
    return config


READ_ALIKE = [
    ("llama", {}),
    ("llama", NO_ROPE),
    ("llama", NO_ROPE | {"rope_theta": 5e5}),
    ("llama", NO_ROPE | {"rope_theta": 5e5, "rope_scaling": None}),
    ("llama", NO_ROPE | {"rope_theta": 5e5, "rope_scaling": SCALING}),
    ("llama", NO_ROPE | {"rope_scaling": SCALING}),
    ("llama", NO_ROPE | {"rope_scaling": {"type": "llama3"} | {k: v for k, v in SCALING.items() if k != "rope_type"}}),
    ("llama", {"rope_parameters": LLAMA3_ROPE, "rope_scaling": LLAMA3_ROPE}),
    ("llama", {"rope_parameters": PLAIN, "rope_scaling": SCALING}),
    ("llama", {"rope_parameters": PLAIN, "rope_scaling": LLAMA3_ROPE | {"rope_theta": 10000.0}}),
    ("llama", {"rope_parameters": LLAMA3_ROPE, "rope_scaling": None, "rope_theta": 50000.0}),
    ("llama", {"rope_parameters": LLAMA3_ROPE | {"type": "llama3"}}),
    ("llama", {"num_key_value_heads": None, "head_dim": None, "tie_word_embeddings": True}),
    ("qwen2", NO_ROPE | {"rope_theta": 1e6}),
    ("qwen2", {"use_sliding_window": False, "sliding_window": 64, "max_window_layers": 2}),
    ("mixtral", NO_ROPE),
    ("deepseek_v3", NO_ROPE | {"rope_theta": 1e5, "rope_scaling": LEGACY_YARN}),
    ("deepseek_v3", {"rope_parameters": PLAIN, "rope_scaling": LEGACY_YARN}),
    ("kimi_k2", NO_ROPE | {"rope_theta": 1e5, "rope_scaling": LEGACY_YARN}),
    ("glm4_moe", NO_ROPE | {"rope_theta": 1e6, "rope_scaling": None}),
    ("glm4_moe", NO_ROPE | {"rope_theta": 1e6, "partial_rotary_factor": 0.25}),
]


@pytest.mark.parametrize(("family", "changes"), [*[(family, {}) for family in FAMILIES], *READ_ALIKE])
def test_rotary_settings_are_those_of_the_model_that_transformers_builds(
    tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    """The frequencies themselves: those of transformers' module, against the scaling's formula with our constants."""
    folder = written(tmp_path, family, changes)
    config = checked(folder)
    rope = family_of(config).rope(config)
    kind, hf_config = skeleton_of(folder)
    with torch.device("meta"):
        model = kind(hf_config)
    theirs = type(model.model.rotary_emb)(model.config).inv_freq
    dim = 2 * len(theirs)
    if family_of(config).latents(config) is None:
        assert dim == head_dim(config) * rope.fraction
    plain = rope.theta ** -(torch.arange(0, dim, 2).float() / dim)
    if rope.llama3 is not None:  # Llama 3.1: wavelengths beyond original / low are stretched, below original / high not
        wave, length = 2 * torch.pi / plain, rope.llama3["original_max_position_embeddings"]
        low, high, factor = (rope.llama3[key] for key in ("low_freq_factor", "high_freq_factor", "factor"))
        smooth = ((length / wave - low) / (high - low)).clamp(0, 1)
        plain = plain * (smooth + (1 - smooth) / factor)
    if rope.yarn is not None:  # unstretched in front, by the factor behind; the seam is the reference model's
        seam = theirs / plain
        assert seam[0] == pytest.approx(1)
        assert seam[-1] == pytest.approx(1 / rope.yarn["factor"])
    else:
        torch.testing.assert_close(theirs, plain, rtol=1e-5, atol=0)


DIFFERENT = [
    ("llama", {"rope_scaling": SCALING}, "rope_theta=10000.0"),  # the base of 50000 would be lost
    ("llama", {"rope_scaling": OTHER}, "'factor': 4.0"),
    ("llama", {"rope_scaling": PLAIN | {"rope_theta": 50000.0}}, "rope_parameters"),
    ("llama", {"rope_parameters": PLAIN | {"rope_theta": 1e6}, "rope_scaling": SCALING}, "1000000.0"),
    ("llama", {"rope_theta": 1e6}, "rope_theta=1000000.0"),
    ("llama", {"rope_parameters": LLAMA3_ROPE | {"type": "default"}}, "type='default'"),
    ("llama", {"rope_parameters": LLAMA3_ROPE | {"rope_type": None}}, "rope_type=None"),
    ("llama", {"original_max_position_embeddings": 128}, "original_max_position_embeddings=128"),
    ("llama", {"rope_parameters": LLAMA3_ROPE | {"factor": 0.5}}, "factor=0.5"),
    ("llama", {"rope_parameters": LLAMA3_ROPE | {"factor": True}}, "factor"),
    ("llama", {"rope_parameters": LLAMA3_ROPE | {"high_freq_factor": 1.0}}, "high_freq_factor=1.0"),
    ("llama", {"rope_parameters": LLAMA3_ROPE | {"original_max_position_embeddings": 64.5}}, "64.5"),
    ("llama", {"rope_parameters": PLAIN | {"mrope_section": [1, 2]}}, "mrope_section"),
    ("llama", {"rope_parameters": {"full_attention": PLAIN}}, "full_attention"),
    ("llama", {"rope_parameters": PLAIN | {"rope_theta": None}}, "rope_theta=None"),
    ("llama", {"rope_parameters": PLAIN | {"rope_theta": "1e4"}}, "rope_theta='1e4'"),
    ("llama", {"rope_parameters": PLAIN | {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    ("llama", {"rotary_pct": 0.5}, "rotary_pct=0.5"),
    ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}, "'linear'"),
    ("llama", NO_ROPE | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
    ("llama", NO_ROPE | {"rope_scaling": {"type": "longrope", "short_factor": [1], "long_factor": [1]}}, "'longrope'"),
    ("deepseek_v3", {"rope_parameters": YARN | {"beta_fast": 0}}, "beta_fast=0"),
    ("deepseek_v3", {"rope_scaling": LEGACY_YARN | {"factor": 4.0}}, "'factor': 4.0"),
    ("llama", {"sliding_window": 64}, "sliding_window=64"),  # vLLM alone would keep to it
    ("llama", {"logit_scale": 2.0}, "logit_scale=2.0"),
    ("llama", {"attention_dropout": 0.1}, "attention_dropout=0.1"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ("llama", {"text_config": {"hidden_size": 64}}, "text_config"),
    ("llama", {"model_type": "qwen2"}, "model_type='qwen2'"),
    ("llama", {"model_type": "no-such-model"}, "set it to 'llama'"),
    ("qwen2", {"head_dim": 64}, "head_dim=64"),  # vLLM takes hidden_size / num_attention_heads
    ("qwen2", {"layer_types": ["sliding_attention"] * 4}, "layer_types"),
    ("qwen2", {"layer_types": ["full_attention"] * 3}, "layer_types"),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}, "use_sliding_window=True"),
    ("qwen3_moe", {"num_local_experts": 16, "num_experts": 8}, "the number of experts is 8"),
    ("kimi_k2", {"model_type": "kimi_k3"}, "set it to 'deepseek_v3' or 'kimi_k2'"),
    ("glm4_moe", {"partial_rotary_factor": 0.25}, "partial_rotary_factor=0.25"),
]


@pytest.mark.parametrize(("family", "changes", "said"), DIFFERENT)
def test_config_values_that_readers_take_differently_are_refused(
    tmp_path: Path, family: str, changes: dict[str, Any], said: str
) -> None:
    folder = written(tmp_path, family, changes)
    with pytest.raises(UserMistake) as refused:
        checked(folder)
    assert said in str(refused.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_defaults_are_ours(tmp_path: Path, family: str) -> None:
    """Each key left out in turn: what is not refused then is read as transformers reads it."""
    folder = written(tmp_path, family, {})
    whole = json.loads((folder / "config.json").read_text())
    wrong, passed = [], []
    for key in whole:
        (folder / "config.json").write_text(json.dumps({k: v for k, v in whole.items() if k != key}))
        try:
            checked(folder)
            passed.append(key)
        except UserMistake as error:
            if not (key in str(error) or (key == "architectures" and "architecture" in str(error))):
                wrong.append((key, str(error)))
    assert wrong == []
    assert len(passed) > 10
