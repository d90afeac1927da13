"""The bytes of vLLM's own weight transfers, counted by its planning code, against sums by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from methods.vllm_transfers import count_received

from commands import ROOT
from hybrid3d.bench.scaling import Scale, scale_recipe, write_model
from hybrid3d.config import load_recipe
from hybrid3d.train.megatron.probe import expected_shapes

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]

DENSE = ("qwen3-8b", "train.tp=2 train.pp=2 train.dp=1 rollout.tp=2", Scale(2, 1024))
SPARSE = ("mixtral-8x7b", "train.tp=1 train.pp=1 train.ep=4 train.dp=4 rollout.tp=4", Scale(2, 1024))
ITEMSIZE = 2  # of bfloat16
WHOLE = ("norm.weight", "gate.weight")  # on each rank; all others are divided by TP
KEYS = ("k_proj.weight", "v_proj.weight")  # whose heads several ranks have where there are fewer than ranks
MAPPED = ("o_proj.weight", "down_proj.weight")  # 1:1 by vLLM's m2n: it fuses the others, or they have no loader
ROUTER = "block_sparse_moe.gate.weight"


@pytest.mark.parametrize(("name", "settings", "scale"), [DENSE, SPARSE], ids=["dense", "sparse"])
def test_received_bytes_are_those_that_vllm_plans(name: str, settings: str, scale: Scale, tmp_path: Path) -> None:
    recipe, config = scale_recipe(load_recipe(ROOT / f"recipes/{name}.yaml", settings.split()), scale)
    recipe = replace(recipe, model=replace(recipe.model, path=str(tmp_path)))
    write_model(recipe, config)
    shapes = expected_shapes(config)
    assert recipe.rollout is not None
    tp, workers = recipe.rollout.tp, recipe.generation_ranks
    nbytes = {name: ITEMSIZE * math.prod(shape) for name, shape in shapes.items()}
    parts = {WHOLE: 1, KEYS: min(tp, config["num_key_value_heads"])}
    sliced = sum(n // next((p for ends, p in parts.items() if name.endswith(ends)), tp) for name, n in nbytes.items())
    mapped = sum(n // tp for name, n in nbytes.items() if name.endswith(MAPPED))
    mapped += sum(n for name, n in nbytes.items() if name.endswith(ROUTER))
    whole = sum(n for name, n in nbytes.items() if not name.endswith((*MAPPED, ROUTER)))
    found = count_received(recipe, shapes)
    assert found.sharded_rdt == workers * sliced
    assert (found.m2n, found.m2n_mapped) == (workers * (mapped + whole), workers * mapped)
