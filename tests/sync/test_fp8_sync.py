"""FP8 syncs between real ranks, real Megatron and real vLLM, which also generates: `jobs/fp8_sync.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import IN_BLOCKS, LATENT, make_checkpoint
from fp8_grid import quantized_by_vllm
from run_ranks import run_ranks

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1200)]

JOB = Path(__file__).parents[1] / "jobs" / "fp8_sync.py"
PACKS = torch.cpu._is_amx_tile_supported()  # vLLM's kernels then pack experts in FP8, which a sync sends whole
DERIVED = ("W_UV", "W_UK_T")  # of which vLLM's processing makes new ones, whatever landed


def case_of(root: Path, family: str, train: dict[str, int], tp: int, **changes: int) -> dict[str, Any]:
    """Write both checkpoints of a case."""
    bf16, fp8 = root / "bf16" / family, root / "fp8" / family
    make_checkpoint(bf16, family, 1, dtype="bfloat16", **(IN_BLOCKS[family] | changes))
    fp8.mkdir(parents=True)
    for file in bf16.iterdir():
        if file.suffix == ".safetensors":
            save_file(quantized_by_vllm(load_file(file)), fp8 / file.name, metadata={"format": "pt"})
        else:
            (fp8 / file.name).write_bytes(file.read_bytes())
    return {"family": family, "bf16": str(bf16), "fp8": str(fp8), "train": train, "tp": tp}


def run(root: Path, ranks: int, cases: list[dict[str, Any]]) -> list[list[list[dict[str, Any]]]]:
    """Return the results by case and rank."""
    (root / "cases.json").write_text(json.dumps(cases))
    run_ranks(JOB, ranks, [str(root / "out.json"), str(root / "cases.json")], timeout=1100)
    return [list(of_ranks) for of_ranks in zip(*json.loads((root / "out.json").read_text()), strict=True)]


def assert_right(results: list[list[dict[str, Any]]], family: str) -> None:
    for of_rank in results:
        first, overlapped, again, changes = of_rank
        assert [r["what"] for r in of_rank] == ["first", "overlapped", "first", "changes"]
        for result in (first, again):
            assert result["received_bytes"] == result["lower_bound_bytes"]
            for what in ("loader_layout", "outputs", "logprobs"):
                assert result["loaded"][what]["elements"] > 0
                assert result["loaded"][what]["wrong"] == [], what
        for result in (overlapped, changes):
            assert result["corrupted"] == []
            for what in ("landed", "live", "outputs", "logprobs"):
                wrong = result[what]["wrong"]
                assert [name for name in wrong if what != "landed" or not name.endswith(DERIVED)] == [], what
                assert family in LATENT or wrong == []
        assert changes["dense_reason"] == ""
        most = 1 if PACKS else 0.2
        assert changes["received_bytes"] < most * changes["dense_bytes"] or not changes["dense_bytes"]
    early, split = (max(of_rank[1][key] for of_rank in results) for key in ("early_bytes", "split"))
    assert (early > 0) == (split == 0), "blocks that are split wait for the last update"


def test_experts_and_latent_attention(tmp_path: Path) -> None:
    case = case_of(tmp_path, "deepseek_v3", dict(tp=2, ep=2), 1, num_hidden_layers=2)
    assert_right(run(tmp_path, 2, [case])[0], "deepseek_v3")


@pytest.mark.slow
def test_grouped_queries_at_tp2(tmp_path: Path) -> None:
    """Experts, and blocks that TP splits among four ranks."""
    cases = [
        case_of(tmp_path, "qwen3_moe", dict(dp=4, ep=2, etp=2), 2),
        case_of(tmp_path, "qwen3", dict(tp=4), 2, intermediate_size=768),
    ]
    for case, results in zip(cases, run(tmp_path, 4, cases), strict=True):
        assert_right(results, case["family"])


@pytest.mark.slow
def test_grouped_queries_at_tp1(tmp_path: Path) -> None:
    """Experts, and biases and tied embeddings."""
    cases = [
        case_of(tmp_path, "mixtral", dict(tp=2, pp=2, ep=2), 1),
        case_of(tmp_path, "qwen2", dict(tp=2, pp=2), 1),
    ]
    for case, results in zip(cases, run(tmp_path, 4, cases), strict=True):
        assert_right(results, case["family"])
