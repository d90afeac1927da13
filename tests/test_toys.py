"""What a new kind of an interface costs: each toy is one file. A feature that needs more has found a missing interface.

`toys/negated_source.py` is a source and `toys/doubling_sink.py` a sink; two ranks sync from one to the other.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from run_ranks import run_ranks

JOB = Path(__file__).parent / "jobs" / "toy_sync.py"
NAMES = ["model.layers.0.weight", "model.layers.1.weight", "model.norm.weight"]
HALF = 6 * 4 * 4  # bytes of what a rank holds of a tensor


@pytest.mark.processes
def test_a_toy_source_is_synced_to_a_toy_sink(tmp_path: Path) -> None:
    run_ranks(JOB, 2, [str(tmp_path)], timeout=120)
    trainer, both = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    for version, (one, other) in enumerate(zip(trainer, both, strict=True)):
        assert one["right"] == other["right"] == NAMES
        assert (one["version"], other["version"]) == (version, version)
        assert (one["received"], other["received"]) == (0, HALF * len(NAMES)) == (one["bound"], other["bound"])
        assert one["corrupted"] == other["corrupted"] == []
