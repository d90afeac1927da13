"""A shard of vLLM's vocabulary that is padding alone: 331 tokens are padded to 384, and at TP8 the last 48 are none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from checkpoints import make_config
from hybrid3d import cli
from test_cli import RECIPE

pytestmark = pytest.mark.engines


def test_empty_shard_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    vocabulary, hidden = 331, 128
    config = make_config("qwen2").to_dict() | {"architectures": ["Qwen2ForCausalLM"], "vocab_size": vocabulary}
    config |= {"num_attention_heads": 8, "head_dim": hidden // 8}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    recipe = RECIPE | {"train": {"tp": 2, "pp": 4}, "rollout": {"tp": 8, "max_model_len": 128, "max_new_tokens": 8}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    monkeypatch.chdir(tmp_path)
    assert cli.main(["plan", "recipe.yaml", "--json"]) == cli.DONE
    found = json.loads(capsys.readouterr().out)
    assert found["coverage"] == "exact"
    assert found["received_bytes"] == found["lower_bound_bytes"]
    # The matrices of 4 layers once in all, 2 KV heads of 16 copied to 8 ranks, biases; norms on every rank.
    width = config["intermediate_size"]
    per_layer = 2 * hidden * hidden + 3 * hidden * width + hidden + 2 * 8 * 16 * (hidden + 1) + 8 * 2 * hidden
    elements = vocabulary * hidden + 4 * per_layer + 8 * hidden
    assert found["wanted_bytes"] == elements * {"float32": 4, "bfloat16": 2}[config_dtype()]


def config_dtype() -> str:
    from hybrid3d.config import load_recipe

    return str(load_recipe("recipe.yaml").model.dtype)
