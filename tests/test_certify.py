"""`hybrid3d certify` accepts every family, and refuses faults of the field's issue trackers with the tensor's name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import FAMILIES
from commands import ROOT, hybrid3d
from hybrid3d.doctor.certify.findings import CHECKS, Findings, describe_difference
from hybrid3d.doctor.certify.shrinking import shrunk
from hybrid3d.families import family_of
from run_ranks import run_ranks

MODELS = sorted(path.parent for path in (ROOT / "recipes/models").glob("*/config.json"))
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


def test_a_difference_names_the_element() -> None:
    expected = torch.arange(6.0).view(2, 3)
    found = expected.clone()
    assert describe_difference(found, expected) == ""
    found[1, 2] = 7
    assert describe_difference(found, expected) == "1 of 6 elements differ, at [1, 2] 7 instead of 5"
    assert describe_difference(expected.bfloat16(), expected) == "bfloat16 [2, 3] instead of float32 [2, 3]"
    assert describe_difference(torch.tensor(0.0), torch.tensor(-0.0)) == "1 of 1 elements differ, at [] 0 instead of -0"
    findings = Findings()
    findings.compare("weights", {"a": expected, "b": expected}, {"a": found, "c": expected})
    wrong = findings.checks["weights"].wrong
    assert [text.partition(":")[0] for text in wrong] == ["b", "c", "a"]


@pytest.mark.parametrize("model", MODELS, ids=[path.name for path in MODELS])
def test_a_tiny_model_has_layers_of_each_kind(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    small, family = shrunk(config, layers=2), family_of(config)
    kinds = family.representative_layers(config)
    assert set(family.representative_layers(small)) == set(kinds)
    assert family.rope(small) == family.rope(config)
    assert (family.latents(small) is None) == (family.latents(config) is None)
    assert small["num_hidden_layers"] <= 4
    assert small["hidden_size"] <= 2048
