"""`hybrid3d certify` accepts every family, and refuses faults of the field's issue trackers with the tensor's name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpoints import FAMILIES
from commands import hybrid3d
from hybrid3d.doctor.certify.findings import CHECKS
from run_ranks import run_ranks

pytestmark = [pytest.mark.engines, pytest.mark.processes, pytest.mark.timeout(900)]

JOB = Path(__file__).parent / "jobs" / "certify.py"
TWO = "train.tp=2 rollout.tp=2"
ROTARY = "rotary_emb.cos_sin_cache: "


def refusals(tmp_path: Path, model: Path, settings: str, *faults: str, ranks: int = 2) -> dict[str, dict[str, Any]]:
    """Run certifications with faults; return, of each, what each check that refuses it says."""
    out = tmp_path / "out.json"
    run_ranks(JOB, ranks, [str(out), str(model), settings, *faults], timeout=600)
    found = json.loads(out.read_text())
    assert list(found) == list(faults)
    return {
        fault: {name: check["wrong"] for name, check in result["checks"].items() if check["wrong"]}
        for fault, result in found.items()
    }


def names(wrong: list[str]) -> set[str]:
    return {text.partition(":")[0] for text in wrong}
