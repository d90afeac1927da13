"""LoRA's sums, in FP8 or where they changed, are in vLLM bit for bit: `jobs/merged_sync.py`, on four ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from checkpoints import IN_BLOCKS, make_checkpoint
from run_ranks import run_ranks

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1200)]

JOB = Path(__file__).parents[1] / "jobs" / "merged_sync.py"


def run(out: Path, folder: Path, tp: int, quantization: str, train: dict[str, int]) -> list[list[dict]]:
    """Return what each sync found, by rank."""
    run_ranks(JOB, 4, [str(out), str(folder), str(tp), quantization, json.dumps(train)], timeout=1100)
    found: list[list[dict]] = json.loads(out.read_text())
    return found


def assert_right(results: list[list[dict]]) -> None:
    for of_rank in results:
        for result in of_rank:
            for what in ("landed", "live", "outputs", "logprobs"):
                assert result[what]["elements"] > 0
                assert result[what]["wrong"] == [], what
            assert result["restored"]["wrong"] == [], "the policy's own weights come back bit for bit"
            assert result["corrupted"] == []
        first, *later = of_rank
        assert first["dense_reason"] == "it is the first sync of these processes"
        assert first["received_bytes"] == first["lower_bound_bytes"]
        assert [result["dense_reason"] for result in later] == [""] * len(later)
    for syncs in [*zip(*results, strict=True)][1:]:
        assert 0 < sum(result["received_bytes"] for result in syncs) < sum(result["dense_bytes"] for result in syncs)


def test_changed_sums(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Experts too have adapters; what is frozen is never sent again."""
    assert_right(run(tmp_path / "out.json", tiny_checkpoint("qwen3_moe"), 2, "plain", {"tp": 2, "pp": 2, "ep": 2}))


@pytest.mark.slow
def test_changed_sums_in_fp8(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "qwen2", 1, dtype="bfloat16", **IN_BLOCKS["qwen2"])
    assert_right(run(tmp_path / "out.json", folder, 1, "fp8", {"tp": 2, "pp": 2}))
