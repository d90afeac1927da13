"""Optimizers of which each rank saves its own shard, as Megatron's `dp_reshardable`: resumed bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from run_ranks import run_ranks
from test_megatron import make_inputs

pytestmark = [pytest.mark.processes, pytest.mark.engines]

CASES = [("qwen2", "float32"), ("qwen3_moe", "bfloat16")]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Any) -> Path:
    out = tmp_path_factory.mktemp("sharding")
    checkpoints = {
        family: {name: str(tiny_checkpoint(family, seed)) for name, seed in (("start", 1), ("other", 2))}
        for family, _ in CASES
    }
    torch.save(make_inputs() | {"checkpoints": checkpoints, "cases": CASES}, out / "inputs.pt")
    job = Path(__file__).parents[1] / "jobs" / "optimizer_sharding.py"
    run_ranks(job, 4, [str(out / "inputs.pt"), str(out), "save"], timeout=300)
    run_ranks(job, 2, [str(out / "inputs.pt"), str(out), "load"], timeout=300)
    return out


def of_ranks(results: Path, what: str, family: str, dtype: str, ranks: int) -> list[dict[str, Any]]:
    return [torch.load(results / f"{what}-{family}-{dtype}-rank{rank}.pt") for rank in range(ranks)]


@pytest.mark.parametrize(("family", "dtype"), CASES)
def test_resume_is_the_run_that_was_not_interrupted(results: Path, family: str, dtype: str) -> None:
    for found in of_ranks(results, "save", family, dtype, 4):
        assert found["possible"]
        for sharding in ("fully_reshardable", "dp_reshardable"):
            assert not found[f"{sharding} before"]
            assert found[f"{sharding} progress"] == {"told": sharding}
            assert found[f"{sharding} loaded"]
            assert found[f"{sharding} went on"]
        assert found["host"]["dp_reshardable"] == 0
        assert found["host"]["fully_reshardable"] > 0


@pytest.mark.parametrize(("family", "dtype"), CASES)
def test_optimizer_state_is_the_same_with_another_data_parallel_size(results: Path, family: str, dtype: str) -> None:
    """As from the format that every layout can be loaded from; another TP is refused with both."""
    for found in of_ranks(results, "load", family, dtype, 2):
        assert found["equal"]
        assert "train.tp=1, saved was 2" in found["said"]
        assert "run.optimizer_sharding=fully_reshardable" in found["said"]


@pytest.mark.parametrize(("family", "dtype"), CASES)
def test_size_is_expected_where_replicas_hold_other_experts(results: Path, family: str, dtype: str) -> None:
    """In a layout of two data-parallel ranks, which share out the experts; torch adds little to each tensor."""
    for found in of_ranks(results, "load", family, dtype, 2):
        assert found["expected"] == pytest.approx(found["written"], rel=0.1)
