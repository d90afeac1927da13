"""Corrupted syncs in a run of four ranks: weights are sent once more, and never used for generation while corrupt."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from run_ranks import RanksFailed, run_ranks

JOB = Path(__file__).parents[1] / "jobs" / "broken_sync.py"
NOT_WHOLE = "vLLM's weights are incomplete"


@pytest.mark.engines
@pytest.mark.timeout(600)
@pytest.mark.parametrize("shared_memory", ["auto", pytest.param("never", marks=pytest.mark.slow)])
def test_half_applied_sync_is_never_generated_with(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, shared_memory: str
) -> None:
    with pytest.raises(RanksFailed, match="failed with exit code"):
        run_ranks(JOB, 4, [str(tmp_path), str(tiny_checkpoint("qwen2")), shared_memory], timeout=500)
    said = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert sorted(said) == ["0", "1", "2"]
    for rank, of_rank in said.items():
        peers = sorted({0, 1, 2, 3} - {int(rank)})
        assert of_rank["peers"] == (str(peers) if shared_memory == "auto" else "")
        assert of_rank["before"].startswith(NOT_WHOLE)
        assert of_rank["synced"] == "8"
        assert (of_rank["once"], of_rank["after once"]) == ("1", "8")
        assert "tensors arrived corrupted twice: model." in of_rank["always"]
        assert of_rank["after always"].startswith(NOT_WHOLE)
        assert (of_rank["overlapped"], of_rank["after overlapped"]) == ("1", "8")
        assert of_rank["whole again"] == "0"
        assert of_rank["killed"].startswith(("RuntimeError", "DistBackendError", "DistNetworkError"))
        assert of_rank["after killed"].startswith(NOT_WHOLE)
