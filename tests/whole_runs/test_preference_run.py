"""DPO through the real commands: the recipe of the demo's preferences, resumed, exported and evaluated."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from commands import ROOT, hybrid3d, read_rows, warm_checkpoint, without

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(1500)]

STEPS, RESUMED_FROM = 12, 6
RECIPE = str(ROOT / "recipes/demo-preferences.yaml")
SETTINGS = [
    *("model.path=warm", f"run.steps={STEPS}", "run.eval_every=6", f"run.checkpoint_every={RESUMED_FROM}"),
    *("optimizer.lr=3e-4", "optimizer.warmup_steps=0", "run.keep_last=0"),
]
PACKED = ["train.tp=2", "train.pp=2", "train.packed=true", "train.max_tokens_per_micro_batch=512"]


@pytest.fixture(scope="module")
def work(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = warm_checkpoint(tmp_path_factory.mktemp("preferences"), demo)
    hybrid3d(work, "train", RECIPE, *SETTINGS)
    return work


def test_held_out_pairs_are_ranked_right(work: Path) -> None:
    rows = {row["step"]: row for row in read_rows(work / "runs/demo-preferences")}
    evaluated = [rows[step]["eval/preference_accuracy"] for step in (0, 6, STEPS)]
    assert evaluated[0] == rows[0]["eval/preference_margin"] == 0  # of the policy, which is the reference
    assert rows[0]["train/loss"] == pytest.approx(0.693147, abs=1e-6)
    assert evaluated[-1] > 0.6
    assert rows[STEPS]["eval/preference_margin"] > rows[6]["eval/preference_margin"] > 0
    assert "train/loss" not in rows[STEPS]  # which is only evaluated


def test_resumed_run_repeats_what_would_have_come(work: Path) -> None:
    run = work / "runs/demo-preferences"
    went_on = read_rows(run)
    shutil.rmtree(run / f"checkpoints/step-{STEPS:06}")
    hybrid3d(work, "train", RECIPE, *SETTINGS)
    assert without(read_rows(run)) == without(went_on)


def test_packed_on_four_ranks_equals_one_rank(work: Path) -> None:
    hybrid3d(work, "train", RECIPE, *SETTINGS, *PACKED, "rollout.tp=2", "name=packed", "run.steps=3")
    rows = zip(read_rows(work / "runs/packed")[:3], read_rows(work / "runs/demo-preferences"), strict=False)
    for packed, padded in rows:
        for key in ("train/loss", "train/grad_norm", "preference/margin", "preference/chosen_logprob"):
            assert packed[key] == pytest.approx(padded[key], rel=1e-3, abs=1e-5), key


def test_export_and_evaluation(work: Path) -> None:
    hybrid3d(work, "export", "runs/demo-preferences", "exported")
    before, after = (load_file(work / folder / "model.safetensors") for folder in ("warm", "exported"))
    assert before.keys() == after.keys()
    name = "model.embed_tokens.weight"
    assert not torch.equal(before[name], after[name])
    found = json.loads(hybrid3d(work, "eval", "runs/demo-preferences", "--json"))
    assert found["step"] == STEPS
    assert 0 <= found["metrics"]["eval/accuracy"] <= 1
