"""DeepSeek-V3 671B and Qwen3-235B, planned from both engines' own models on meta, without weights."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hybrid3d.config import Recipe, load_recipe
from hybrid3d.planning import engine_queries, traffic
from hybrid3d.reshard.plan.box import Box
from hybrid3d.reshard.plan.layout import Holdings, Piece
from hybrid3d.reshard.plan.planner import PlanError
from hybrid3d.rollout.probe import slot_demands, trace_demand
from hybrid3d.train.megatron.probe import expected_shapes, holdings_of, holdings_of_all

pytestmark = [pytest.mark.engines]

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
EXPERT_PARALLEL = ["rollout.tp=8", "rollout.dp=4", "rollout.expert_parallel=true"]
CASES = {
    "deepseek-v3-671b": [],
    "deepseek-v3-671b-expert-parallel": EXPERT_PARALLEL,
    "qwen3-235b-a22b": [
        "model.path=recipes/models/qwen3-235b-a22b",
        *("train.tp=4", "train.pp=4", "train.vpp=2", "train.ep=16", "train.dp=8"),
        *("train.first_stage_layers=22", "train.last_stage_layers=null"),
        "rollout.tp=8",
    ],
}


def recipe_of(case: str, *overrides: str) -> Recipe:
    return load_recipe(RECIPES / "deepseek-v3-671b.yaml", [*CASES[case], *overrides])


def config_of(recipe: Recipe) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((Path(recipe.model.path) / "config.json").read_text())
    return config


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(RECIPES.parent)


@pytest.mark.parametrize("case", ["deepseek-v3-671b", "qwen3-235b-a22b"])
def test_megatron_says_the_same_of_every_layer(case: str) -> None:
    recipe = recipe_of(case)
    config, world = config_of(recipe), recipe.world_size
    replicated = holdings_of_all(config, recipe)
    assert len(replicated) == world
    stage = world // recipe.train.pp
    for rank in (0, 1, stage - 1, stage, 2 * stage + 3, world // 2 + 5, world - stage, world - 1):
        assert replicated[rank] == holdings_of(config, recipe.train, rank, torch.bfloat16), f"rank {rank}"


@functools.cache
def asked(case: str) -> Any:
    recipe = recipe_of(case)
    config = config_of(recipe)
    shapes = expected_shapes(config)
    return recipe, shapes, slot_demands(config, recipe, shapes)


@pytest.mark.parametrize(
    ("case", "ranks"),
    [
        ("deepseek-v3-671b-expert-parallel", (0, 31)),
        pytest.param("deepseek-v3-671b", (0, 1, 2, 7, 8, 17, 30, 31), marks=pytest.mark.slow),
        pytest.param("deepseek-v3-671b-expert-parallel", (1, 2, 7, 8, 17, 30), marks=pytest.mark.slow),
        pytest.param("qwen3-235b-a22b", range(8), marks=pytest.mark.slow),
    ],
)
@pytest.mark.timeout(1200)
def test_vllm_says_the_same_of_every_layer(case: str, ranks: tuple[int, ...]) -> None:
    recipe, shapes, replicated = asked(case)
    for rank in ranks:
        assert replicated[rank] == trace_demand(recipe, shapes, rank), f"rank {rank}"


LOST = "model.layers.40.mlp.experts.77.down_proj.weight"


def without(piece: Piece) -> list[Piece]:
    return []


def one_row_on(piece: Piece) -> list[Piece]:
    return [dataclasses.replace(piece, box=Box((piece.box.start[0] + 1, piece.box.start[1]), piece.box.size))]


@pytest.mark.parametrize("spoil", [without, one_row_on])
def test_tensor_unlike_the_others_is_not_lost_among_them(
    spoil: Callable[[Piece], list[Piece]], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of("deepseek-v3-671b-expert-parallel", "train.dp=1", "train.ep=8")
    config = config_of(recipe)
    spoiled = {
        rank: Holdings(tuple(q for p in held.pieces for q in ([p] if p.name != LOST else spoil(p))))
        for rank, held in holdings_of_all(config, recipe).items()
    }
    monkeypatch.setattr(
        engine_queries, "representative_layer_counts", lambda config, layout: dict.fromkeys(range(61), 1)
    )
    monkeypatch.setattr(engine_queries, "holdings_of_all", lambda config, recipe, layers: spoiled)
    with pytest.raises(PlanError, match=LOST):
        traffic.compute_sync_traffic(recipe, engine_queries.query_engines(recipe, config))


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe", "deepseek_v3"])
def test_plan_by_classes_has_the_numbers_of_the_whole_plan(
    family: str, tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One layer of each kind in every stage stands for all, against every transfer of the plan of all layers."""
    layout = ["train.tp=2", "train.pp=2", "train.dp=2", "train.first_stage_layers=1", "train.last_stage_layers=null"]
    changes = [f"model.path={tiny_checkpoint(family)}", "rollout.max_model_len=128", "rollout.max_new_tokens=8"]
    experts = 2 if family != "qwen2" else 1
    recipe = recipe_of("deepseek-v3-671b", *layout, *changes, f"train.ep={experts}", "rollout.tp=2")
    config = config_of(recipe)
    whole = traffic.compute_sync_traffic(recipe, engine_queries.query_engines(recipe, config))
    monkeypatch.setattr(engine_queries, "MAX_FULL_PLAN_PIECES", 0)
    by_class = traffic.compute_sync_traffic(recipe, engine_queries.query_engines(recipe, config))
    assert whole.buckets is not None
    assert by_class.buckets is None
    assert whole.staging <= by_class.staging
    assert (whole.placement.slots == by_class.placement.slots).all()
    for key in ("held", "wanted", "traffic", "local", "lower_bound", "network_bound", "model", "finalize"):
        assert np.array_equal(getattr(whole, key), getattr(by_class, key)), key
