"""What `hybrid3d plan` adds to the plan: its own checks, the picture, and questions that leave no trace in a rank."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm.platforms import current_platform

import warm_python
from commands import ROOT, python
from hybrid3d.config import Machine, Recipe, Rollout, load_recipe, recipe_to_yaml
from hybrid3d.planning import engine_queries, traffic
from hybrid3d.planning.estimates import gather_traffic, inter_node_bytes
from hybrid3d.planning.page import group_traffic
from hybrid3d.reshard.plan.planner import PlanError
from hybrid3d.rollout import probe
from hybrid3d.rollout.patches import external_rank
from hybrid3d.train.megatron.probe import expected_shapes

pytestmark = pytest.mark.engines


def recipe_for(folder: Path, *overrides: str) -> tuple[Recipe, dict[str, Any]]:
    lengths = ["rollout.max_model_len=128", "rollout.max_new_tokens=8"]
    recipe = load_recipe(ROOT / "recipes/demo-cpu.yaml", [f"model.path={folder}", *lengths, *overrides])
    return recipe, json.loads((folder / "config.json").read_text())


def test_class_that_has_lost_a_tensor_is_seen(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, config = recipe_for(tiny_checkpoint("qwen2"))
    asked = engine_queries.query_engines(recipe, config)
    real = engine_queries.classify_tensors

    def fewer(*args: Any) -> list[Any]:
        return [replace(one, count=max(1, one.count - 1)) for one in real(*args)]

    traffic.compute_sync_traffic(recipe, asked)
    monkeypatch.setattr(engine_queries, "classify_tensors", fewer)
    with pytest.raises(PlanError, match=r"bytes, .* arrive"):
        traffic.compute_sync_traffic(recipe, asked)


def test_split_layout_counted_by_hand(tiny_checkpoint: Callable[..., Path]) -> None:
    """Two ranks train at TP2 and two engines of TP1 generate: on the node of both, or on nodes of their own."""
    split = ["train.tp=2", "train.pp=1", "rollout.tp=1", "roles.generation.ranks=2"]
    for per_node, over_network in ((8, 0), (2, 1)):
        recipe, config = recipe_for(tiny_checkpoint("qwen2"), *split, f"machine.gpus_per_node={per_node}")
        plan = traffic.compute_sync_traffic(recipe, engine_queries.query_engines(recipe, config))
        assert plan.wanted.tolist() == [0, 0, plan.model, plan.model]
        assert (plan.held[:2] > plan.model / 2).all()  # norms are on both
        assert plan.held[2:].tolist() == plan.local.tolist()[2:] == [0, 0]
        received = plan.traffic.sum(0)
        assert received.tolist() == plan.lower_bound.tolist() == plan.wanted.tolist()
        far = inter_node_bytes(plan.traffic, per_node).sum()
        assert far == plan.network_bound == over_network * plan.model  # once for both engines of a node
        gathered = gather_traffic(recipe, plan)
        assert gathered.received_bytes[2:].tolist() == plan.wanted.tolist()[2:]
        assert gathered.far[2:].sum() == pytest.approx(over_network * plan.model, abs=2)


def test_experts_of_layers_around_a_dense_one(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Each slot of four, as its own whole model says it."""
    source = tiny_checkpoint("qwen3_moe")
    config = json.loads((source / "config.json").read_text()) | {"mlp_only_layers": [2], "num_hidden_layers": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    recipe, config = recipe_for(tmp_path, "rollout.tp=1", "rollout.dp=4", "rollout.expert_parallel=true")
    shapes = expected_shapes(config)
    slots = probe.slot_demands(config, recipe, shapes)
    assert [slot.demand for slot in slots] == [probe.trace_demand(recipe, shapes, slot).demand for slot in range(4)]


def test_trace_demand_queries_any_rank_where_few_gpus_are_visible(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where SLURM has set CUDA_VISIBLE_DEVICES: vLLM looks up the device of the local rank that it is given."""
    recipe, config = recipe_for(tiny_checkpoint("qwen2"), "train.tp=4", "train.pp=1", "rollout.tp=4")
    shapes = expected_shapes(config)
    expected = probe.trace_demand(recipe, shapes, 3)
    monkeypatch.setattr(type(current_platform), "is_cuda_alike", lambda self: True)
    monkeypatch.setattr(type(current_platform), "device_control_env_var", "CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(IndexError):
        current_platform.logical_device_id_to_visible_device_id(3)
    assert probe.trace_demand(recipe, shapes, 3).demand == expected.demand


@pytest.mark.parametrize(
    ("rollout", "slot", "rank"), [({"tp": 2}, 5, "5"), ({"tp": 2, "dp": 2, "expert_parallel": True}, 5, "1")]
)
def test_vllm_takes_the_slot_for_its_rank(
    rollout: dict[str, Any], slot: int, rank: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    with external_rank(slot, Rollout(**rollout, max_model_len=8, max_new_tokens=4)):
        assert os.environ["RANK"] == rank
    assert os.environ["RANK"] == "3"


@pytest.mark.parametrize("per_node", [1, 3, 8])
@pytest.mark.parametrize("ranks", [1, 6, 32, 1024])
def test_picture_keeps_every_byte(ranks: int, per_node: int) -> None:
    recipe = replace(load_recipe(ROOT / "recipes/demo-cpu.yaml"), machine=Machine(gpus_per_node=per_node))
    whole = np.arange(ranks * ranks).reshape(ranks, ranks)
    matrix, size = group_traffic(whole, recipe, 16)
    assert matrix.shape == (ranks // size, ranks // size)
    assert len(matrix) <= 16
    assert matrix.sum() == whole.sum()


def test_engine_queries_leave_no_trace_where_engines_will_run(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """A rank that checks its memory and its place has not had vLLM imported; and is refused by the numbers.

    The recipe is derived from a valid one, as for `eval` and `bench`, and its settings contradict each other.
    """
    recipe, _ = recipe_for(tiny_checkpoint("qwen2"), "train.tp=4", "train.pp=1")
    (tmp_path / "recipe.yaml").write_text(recipe_to_yaml(recipe))
    script = (
        f"import sys; sys.executable = {warm_python.executable()!r}"
        + """
from dataclasses import replace
from hybrid3d.config import RecipeError, load_recipe
from hybrid3d.planning.agreed_placement import run_in_subprocess
from hybrid3d.launch.preflight import check_fit
recipe = load_recipe("recipe.yaml")
recipe = replace(recipe, reward=replace(recipe.reward, overlong_buffer=recipe.rollout.max_new_tokens))
check_fit(replace(recipe, machine=replace(recipe.machine, memory_gb=8.0)))
try:
    check_fit(replace(recipe, machine=replace(recipe.machine, memory_gb=0.001)))
except RecipeError as misfit:
    print(misfit)
print(run_in_subprocess("hybrid3d.planning.agreed_placement", recipe))
print("vllm" in sys.modules)
"""
    )
    *refused, slots, imported = python(tmp_path, "-c", script).splitlines()
    assert "recipe demo-cpu does not fit a GPU" in refused[0]
    assert any("of a GPU's 0.0 GB" in line for line in refused)
    assert json.loads(slots) == [0, 2, 1, 3]
    assert imported == "False"
