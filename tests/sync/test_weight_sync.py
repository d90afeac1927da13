"""A sync in which a rank has a source, a sink or both; plain tensors stand for both engines' weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from run_ranks import run_ranks

JOB = Path(__file__).parents[1] / "jobs/one_sided_sync.py"
ROW, TENSORS = 16, 3  # bytes of a row of a tensor


@pytest.mark.engines
def test_rank_has_a_source_a_sink_or_both(tmp_path: Path) -> None:
    run_ranks(JOB, 3, [str(tmp_path)], timeout=120)
    trainer, both, generator = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3))
    for one in (both, generator):
        for version in (7, 8):
            assert one[f"wrong {version}"] == []
            assert one[f"version {version}"] == version
        assert one["commits"] == 2
    # rank 1 wants rows 4 to 12 and holds 8 to 12; rank 2 wants all 12 and holds none
    received = [0, 4 * ROW * TENSORS, 12 * ROW * TENSORS]
    for version in (7, 8):
        assert [one[f"received {version}"] for one in (trainer, both, generator)] == received
        assert all(one[f"corrupted {version}"] == [] for one in (trainer, both, generator))
    assert [one["lower_bound"] for one in (trainer, both, generator)] == received
