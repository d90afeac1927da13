"""Where one update follows, its own forward pass computes the old log-probabilities, as a pass before it does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from commands import ROOT, demo_folder
from run_ranks import run_ranks

pytestmark = [pytest.mark.engines]

JOB = Path(__file__).parents[1] / "jobs/one_update.py"
SETTINGS = [
    *("run.steps=1", "train.micro_batch_size=2", "algorithm.prompts_per_step=8", "algorithm.samples_per_prompt=2"),
    *("guard.initial_mismatch=ignore", "algorithm.correction={kind: truncate, high: 1.5}"),
    "algorithm.kl={where: loss, estimator: k3, coef: 0.01, target: 0.5, horizon: 100}",
]
LAYOUTS = {
    "padded": ["train.tp=2", "train.pp=2"],
    "packed": ["train.tp=1", "train.pp=2", "train.dp=2", "train.packed=true", "train.max_tokens_per_micro_batch=256"],
    "context": ["train.tp=1", "train.pp=2", "train.cp=2", "train.packed=true"],
}


@pytest.fixture(scope="module")
def steps(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """By layout, a step without a pass and one with it."""
    work = demo_folder(tmp_path_factory.mktemp("one-update"), demo)
    common = [*SETTINGS, f"run.dir={work}/runs", f"model.path={work}/build/demo/base"]
    recipe = str(ROOT / "recipes/demo-cpu.yaml")
    cases = {name: {"recipe": recipe, "settings": [*common, *layout]} for name, layout in LAYOUTS.items()}
    (work / "spec.json").write_text(json.dumps(cases))
    run_ranks(JOB, 4, [str(work / "spec.json"), str(work / "out.json")], timeout=300)
    found: dict[str, list[dict[str, Any]]] = json.loads((work / "out.json").read_text())
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_update_of_a_step_is_its_first_pass(steps: dict[str, list[dict[str, Any]]], layout: str) -> None:
    """Bit for bit: every metric, every old log-probability and weight of a token, and every tensor after the update."""
    without, with_pass = steps[layout]
    assert [rank["passes"] for rank in without["ranks"]] == [0] * 4
    assert [rank["passes"] for rank in with_pass["ranks"]] == [1] * 4
    row = without["metrics"]
    assert (row["train/ratio"], row["train/approx_kl"], row["train/clip_fraction"]) == (1.0, 0.0, 0.0)
    assert row == with_pass["metrics"]
    assert row["mismatch/logprob_abs_mean"] > 0
    assert row["train/answer_kl"] == 0.0  # the reference is the policy before the update
    outputs = [rank["old"] for rank in without["ranks"] if rank["old"] is not None]
    assert outputs
    assert all(min(logprobs) < max(logprobs) < 0 for logprobs in outputs)
    for key in ("old", "correction", "weights"):
        assert [rank[key] for rank in without["ranks"]] == [rank[key] for rank in with_pass["ranks"]], key
