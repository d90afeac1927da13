"""FP8 rollouts: every rank of vLLM gets, bit for bit, what vLLM loads from a checkpoint that was quantized whole.

Holdings and demands are those of both real engines, and the checkpoint is quantized by vLLM's own function.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from checkpoints import IN_BLOCKS, SPARSE, make_checkpoint
from commands import ROOT
from fp8_grid import Fp8Grid, rollouts
from grid import Cell
from hybrid3d.config import Train, load_recipe
from hybrid3d.inputs.models import read_config
from hybrid3d.planning.engine_queries import query_engines
from hybrid3d.planning.traffic import compute_sync_traffic

pytestmark = [pytest.mark.engines, pytest.mark.usefixtures("one_thread")]

WIDE = "qwen3, of 768 = 6 blocks"  # TP4 has 1.5 blocks a rank
DENSE_TRAIN: list[dict[str, int]] = [dict(tp=2, pp=2), dict(tp=4), dict(pp=2, vpp=2, dp=2), dict(tp=2, cp=2)]
SPARSE_TRAIN: list[dict[str, int]] = [
    dict(tp=2, dp=2, ep=2),
    dict(dp=4, ep=2, etp=2),
    dict(tp=2, pp=2),
    dict(tp=4, etp=4),
    dict(tp=2, pp=2, dp=2, ep=4, last_stage_layers=1),
]
SPARSE_ROLLOUT: list[dict[str, Any]] = [
    dict(tp=1),
    dict(tp=2),
    dict(tp=2, expert_parallel=True),
    dict(tp=2, dp=2, expert_parallel=True),
]
FAST = [
    ("qwen3", dict(tp=2, pp=2)),
    (WIDE, dict(tp=4)),
    ("qwen3_moe", SPARSE_TRAIN[1]),
    ("deepseek_v3", SPARSE_TRAIN[0]),
]
SLOW = [
    *((family, train) for family in ("qwen2", "llama", "qwen3", WIDE) for train in DENSE_TRAIN),
    *((family, train) for family in SPARSE for train in SPARSE_TRAIN),
]


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Fp8Grid:
    root = tmp_path_factory.mktemp("bf16")

    def folder_of(name: str) -> Path:
        family, folder = name.split(",")[0], root / name.split(",")[0] / str(len(name))
        if not folder.exists():
            changes = IN_BLOCKS[family] | (dict(intermediate_size=768) if name == WIDE else {})
            make_checkpoint(folder, family, 1, dtype="bfloat16", **changes)
        return folder

    return Fp8Grid(folder_of)


@pytest.mark.parametrize(
    ("family", "train"),
    [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW if case not in FAST)],
    ids=lambda value: value if isinstance(value, str) else "-".join(f"{k}{v}" for k, v in value.items()),
)
def test_vllm_gets_what_it_would_load(grid: Fp8Grid, family: str, train: dict[str, int]) -> None:
    """Values and scales, from shards that each rank quantizes; where blocks are split, ranks agree on their scales."""
    layouts = SPARSE_ROLLOUT if family in SPARSE else [dict(tp=1), dict(tp=2), dict(tp=4)]
    if family == WIDE:
        layouts = layouts[:2]
    for rollout in rollouts(*layouts):
        cell = Cell(family, Train(**train), rollout)
        proof = grid.prove(cell)
        assert proof.elements > 100_000
        assert proof.wrong == [], str(cell)
        assert proof.received_bytes == proof.lower_bound_bytes, str(cell)
        assert proof.network_bytes == proof.network_bound_bytes, str(cell)
    if (family, train) in ((WIDE, DENSE_TRAIN[1]), ("deepseek_v3", SPARSE_TRAIN[3])):
        assert grid.split > 0


@pytest.mark.parametrize("family", ["qwen3_moe", pytest.param("deepseek_v3", marks=pytest.mark.slow)])
def test_plans_are_made_of_what_the_engines_say(grid: Fp8Grid, family: str) -> None:
    """`hybrid3d plan` asks about one layer of each kind; here that is compared with all layers of all ranks."""
    for train, rollout in zip(SPARSE_TRAIN, rollouts(*SPARSE_ROLLOUT[1:]), strict=False):
        cell = Cell(family, Train(**train), rollout)
        recipe = grid._recipe(family, cell.train, rollout)
        answers = query_engines(recipe, grid._weights(family)[0])
        trained, engine = grid._trained(family, cell.train), grid._wanted(family, rollout)
        assert {rank: model.holdings for rank, model in trained.items()} == answers.holdings
        for wanted, slot in zip(engine, answers.slots, strict=True):
            assert wanted.demand.pieces == slot.demand.pieces
            assert set(wanted.demand.fills) == set(slot.demand.fills)
        traffic = compute_sync_traffic(recipe, answers)
        assert (traffic.traffic.sum(0) == traffic.lower_bound).all()
        without = dataclasses.replace(recipe, rollout=dataclasses.replace(rollout, quantization=None))
        wanted = compute_sync_traffic(without, query_engines(without, grid._weights(family)[0])).wanted
        assert traffic.unquantized == wanted.sum() > traffic.wanted.sum()


@pytest.mark.slow
def test_large_model_takes_half_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of Llama-3.1-70B, embeddings and head, which stay in bfloat16, are 3 %."""
    monkeypatch.chdir(ROOT)
    received = {}
    for quantization in ("null", "fp8"):
        recipe = load_recipe("recipes/llama-3.1-70b.yaml", [f"rollout.quantization={quantization}"])
        traffic = compute_sync_traffic(recipe, query_engines(recipe, read_config(recipe.model.path)))
        received[quantization] = traffic.traffic.sum()
        assert received[quantization] == traffic.lower_bound.sum() > 0
    assert 0.5 < received["fp8"] / received["null"] <= 0.52
