"""Recorded steps are done again bit for bit, in other layouts up to rounding, and faults are found where they were."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from commands import ROOT, demo_folder, hybrid3d
from run_ranks import run_ranks

pytestmark = [pytest.mark.engines]

JOB = Path(__file__).parent / "jobs/recorded_steps.py"
STEPS, FAULTS = 3, 20
SETTINGS = [
    "model.path=build/demo/base",
    f"run.steps={STEPS}",
    "run.checkpoint_every=1",
    "run.record=always",
    "train.tp=2",
    "train.pp=1",
    "train.micro_batch_size=4",
    "algorithm.prompts_per_step=4",
    "algorithm.samples_per_prompt=2",
    "algorithm.minibatches=2",
    "guard.initial_mismatch=ignore",
]
GRPO = ["name=grpo", "optimizer.warmup_steps=1"]


@pytest.fixture(scope="module")
def work(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `runs/grpo`, and 20 runs like it, each with one bit flipped once."""
    work, dice = demo_folder(tmp_path_factory.mktemp("replay"), demo), random.Random(5)
    faults = [{"seed": n, "from": 1, "step": dice.choice([1, 2]), "before": n % 4 == 0} for n in range(FAULTS)]
    cases = [{"recipe": str(ROOT / "recipes/demo-cpu.yaml"), "settings": [*SETTINGS, *GRPO], "faults": faults}]
    for case in cases:
        case["settings"] += [f"run.dir={work}/runs", f"model.path={work}/build/demo/base"]
    (work / "spec.json").write_text(json.dumps(cases))
    run_ranks(JOB, 2, [str(work / "spec.json")], timeout=300)
    return work


def result(work: Path, run: str, step: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((work / "runs" / run / f"replay/step-{step:06d}.json").read_text())
    return found


def test_a_step_is_done_again_bit_for_bit(work: Path) -> None:
    printed = hybrid3d(work, "replay", "runs/grpo", "--step", "2")
    assert "step 2: equal bit for bit, updated weights included" in printed
    found = result(work, "grpo", 2)
    assert (found["equal"], found["same_layout"], found["start"]) == (True, True, 2)
    row = json.loads((work / "runs/grpo/metrics.jsonl").read_text().splitlines()[2])
    assert found["metrics"]["train/grad_norm"] == {
        "recorded": row["train/grad_norm"],
        "replayed": row["train/grad_norm"],
    }
