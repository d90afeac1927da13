"""Adapters reach vLLM's own slots for them, and equal what vLLM makes of the same files itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hybrid3d.config import load_recipe
from hybrid3d.families import module_of
from hybrid3d.inputs.models import read_config
from hybrid3d.planning.estimates import predict_adapter_sync
from hybrid3d.planning.hardware import hardware_of
from reference import tensors_in
from run_ranks import run_ranks
from test_adapters import is_linear

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

RANK, ALPHA = 4, 6  # a scale that is no power of 2, and a rank below those that vLLM allocates
CASES: list[Any] = [
    pytest.param("qwen2", dict(tp=2, pp=2), 2, None, id="qwen2, TP2 x PP2 to TP2"),
    pytest.param("qwen2", dict(tp=4), 1, None, id="qwen2, TP4 to TP1", marks=pytest.mark.slow),
    pytest.param("qwen3", dict(pp=2, dp=2), 4, None, id="qwen3, PP2 x DP2 to TP4", marks=pytest.mark.slow),
    pytest.param("qwen2", dict(pp=2, vpp=2, tp=2), 2, ("q_proj", "down_proj"), id="two", marks=pytest.mark.slow),
]


def write_adapters(model: Path, out: Path, modules: tuple[str, ...] | None) -> Path:
    random, matrices, names = torch.Generator().manual_seed(3), {}, set()
    for name, weight in sorted(tensors_in(model).items()):
        if is_linear(name, weight) and (modules is None or module_of(name) in modules):
            module = f"base_model.model.{name.removesuffix('.weight')}"
            matrices[f"{module}.lora_A.weight"] = torch.randn(RANK, weight.shape[1], generator=random) * 0.1
            matrices[f"{module}.lora_B.weight"] = torch.randn(weight.shape[0], RANK, generator=random) * 0.1
            names.add(module_of(name))
    out.mkdir()
    save_file(matrices, out / "adapter_model.safetensors", {"format": "pt"})
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": sorted(names), "bias": "none"}
    (out / "adapter_config.json").write_text(json.dumps(settings))
    return out


@pytest.mark.parametrize(("family", "layout", "rollout_tp", "modules"), CASES)
def test_slots_equal_what_vllm_loads_itself(
    family: str,
    layout: dict[str, Any],
    rollout_tp: int,
    modules: tuple[str, ...] | None,
    tmp_path: Path,
    tiny_checkpoint: Any,
) -> None:
    model = Path(tiny_checkpoint(family, 1))
    adapters = write_adapters(model, tmp_path / "adapters", modules)
    job = Path(__file__).parents[1] / "jobs" / "adapter_slots.py"
    arguments = [str(model), str(adapters), str(rollout_tp), json.dumps(layout)]
    run_ranks(job, 4, [str(tmp_path / "out.pt"), *arguments], timeout=400)
    ranks = torch.load(tmp_path / "out.pt")
    for rank in ranks:
        assert rank["nonzero"] > 0
        assert all(rank["same"].values()), [name for name, same in rank["same"].items() if not same]
        assert rank["doubled"]
        assert not rank["corrupted"]
        for received, bound in rank["bytes"]:
            assert received == bound
        received, _ = rank["bytes"][1]
        assert received == rank["wanted"] < rank["bytes"][0][0]  # the model's own weights are sent once
        assert max(rank["mismatch"]) <= 1e-4
    assert any(max(rank["mismatch"]) > 0 for rank in ranks)
    (tmp_path / "recipe.yaml").write_text(ranks[0]["recipe"])
    recipe = load_recipe(tmp_path / "recipe.yaml")
    plan = predict_adapter_sync(
        recipe, read_config(str(model)), range(4), hardware_of(recipe.machine), lambda what: None
    )
    assert plan.received_bytes == sum(rank["bytes"][1][0] for rank in ranks)
    assert plan.lower_bound_bytes == sum(rank["bytes"][1][1] for rank in ranks)
    assert plan.network_bytes == sum(rank["network_bytes"] for rank in ranks)
