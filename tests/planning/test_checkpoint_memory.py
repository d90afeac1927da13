"""The host memory of a node that a checkpoint takes, and how optimizers are saved by it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hybrid3d.config import Machine, Run, Train, load_recipe
from hybrid3d.planning.hardware import hardware_of
from hybrid3d.planning.memory import StageMemory, choose_sharding
from hybrid3d.planning.report import estimate_checkpoint
from run_ranks import ROOT

pytestmark = pytest.mark.engines  # the memory of training is imported beside Megatron

ELEMENTS = 7_615_616_512 // 2  # of Qwen2.5-7B on a rank at TP2, by transformers' count of its parameters


def estimate(dp: int, host_bytes: float = 2e12, trained: int = ELEMENTS, **run: Any) -> Any:
    recipe = load_recipe(ROOT / "recipes/demo-cpu.yaml")
    recipe = replace(
        recipe,
        model=replace(recipe.model, dtype="bfloat16"),
        train=Train(tp=2, dp=dp),
        machine=Machine(gpus_per_node=8),
        run=replace(recipe.run, **run),
    )
    stage = StageMemory(2 * ELEMENTS, 4 * trained, 12 * trained // dp, 0, 0, 0, 0)
    return estimate_checkpoint(recipe, (stage,), replace(hardware_of(recipe.machine), host_bytes=host_bytes))


def test_weights_that_are_not_trained_are_not_saved() -> None:
    found = estimate(4, trained=1000, optimizer_sharding="fully_reshardable")
    assert found.node == 8 * (12 + 2) * 1000


def test_gathered_state_does_not_shrink_with_data_parallel_ranks() -> None:
    """7B at TP2: 366 GB of optimizer state a node, and the weights."""
    for dp in (4, 32):
        found = estimate(dp, optimizer_sharding="fully_reshardable")
        assert found.node == found.gathered == 8 * (12 + 2) * ELEMENTS
    assert pytest.approx(366e9, rel=0.01) == 8 * 12 * ELEMENTS
    for dp in (4, 32):
        found = estimate(dp, optimizer_sharding="dp_reshardable")
        assert found.node == 8 * (2 * ELEMENTS + 12 * ELEMENTS // dp)


def test_default_is_what_fits_the_node() -> None:
    assert estimate(4).sharding == "fully_reshardable"  # of 2 TB
    for less, chosen in ((0, "fully_reshardable"), (1, "dp_reshardable")):  # by the state alone, as the run does
        assert estimate(4, 2 * 8 * 12 * ELEMENTS - less).sharding == chosen
    assert choose_sharding("auto", 366e9, 732e9) == "fully_reshardable"
    assert choose_sharding("auto", 366e9, 731e9) == "dp_reshardable"
    assert choose_sharding("fully_reshardable", 366e9, 1e9) == "fully_reshardable"
    assert choose_sharding("dp_reshardable", 1, 1e9) == "dp_reshardable"
    assert Run(steps=1).optimizer_sharding == "auto"
