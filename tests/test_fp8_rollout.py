"""FP8 rollouts: every rank of vLLM gets, bit for bit, what vLLM loads from a checkpoint that was quantized whole.

Holdings and demands are those of both real engines, and the checkpoint is quantized by vLLM's own function.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from checkpoints import IN_BLOCKS, SPARSE, make_checkpoint
from fp8_grid import Fp8Grid, rollouts
from grid import Cell
from hybrid3d.config import Train

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
        assert grid.split > 100
