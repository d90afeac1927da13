"""Writes folders of runs for the tests of reports, by what writes those of real runs; no rank is started."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from hybrid3d.config import load_recipe
from hybrid3d.generation.samples import Sample
from hybrid3d.run.folder import RunFolder
from hybrid3d.run.logger import Display, RunLogger
from hybrid3d.run.metrics import Span
from run_ranks import ROOT

HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>&amp;\u2028\x1b[31m"
BOUND, BOUND_FROM_3 = 0.04, 0.02  # of guard.max_grad_norm
SPANS: dict[int, list[Span]] = {  # seconds; rank 1 waits while rank 0 trains, and ends a second before it
    0: [("sync", 100.0, 101.0), ("generate", 101.0, 104.0), ("train", 104.0, 110.0)],
    1: [("sync", 100.0, 101.0), ("generate", 101.0, 104.0), ("train", 104.0, 106.0), ("wait", 106.0, 109.0)],
}


def row_of(step: int) -> dict[str, float]:
    """Return the metrics of a step: 90 % of its seconds are in phases."""
    chance = random.Random(step)
    return {
        "step": step,
        "reward/mean": chance.random(),
        "eval/accuracy": 0.1 + step / 7,
        "train/loss": float("nan") if step == 2 else chance.gauss(0, 0.1),
        "train/grad_norm": 0.01 * step,
        "own/metric": 1e-17 * step,
        "sync/received_bytes": 2.5e9 if step % 2 == 0 else 1e8,
        "sync/lower_bound_bytes": 2.5e9,
        "sync/delta_bytes": 0.0 if step % 2 == 0 else 1e8,
        "sync/dense": float(step % 2 == 0),
        "sync/seconds": 0.1,
        "sync/exposed_seconds": 0.05,
        "sync/max_staging_bytes": 123456.0,
        "mismatch/kl": 1e-5,
        "time/sync": 1.0,
        "time/generate": 3.0,
        "time/train": 5.0 - 0.1 * step,
        "time/wait": 0.1 * step,
        "time/step": 10.0,
        "time/eval": 7.0,
        "tokens_per_second": 100.0,
        "data/train_rows": 9,
    }


def sample_of(step: int, place: int, answer: str) -> Sample:
    return Sample(
        prompt=f"question {place} of step {step}",
        prompt_ids=(1, 2),
        tokens=(3, 4, 5),
        loss_mask=(True,) * 3,
        logprobs=(-1.0,) * 3,
        answer=answer,
        reward=float(place % 2),
        versions=(step,) * 3,
    )


def write_run(path: Path, *settings: str, steps: int = 6, ended: bool = True, text: str = HOSTILE) -> RunFolder:
    """Write the folder of a run with `text` wherever a run takes text from others."""
    recipe = load_recipe(
        ROOT / "recipes/demo-cpu.yaml",
        [f"name={path.name}", f"run.steps={steps}", f"guard.max_grad_norm={BOUND}", *settings],
    )
    folder = RunFolder(path)
    path.mkdir(parents=True)
    folder.create(recipe)
    record = RunLogger(folder, 0, Display("run", steps, None))
    record.event("start", step=0)
    for step in range(steps + 1):
        record.step(row_of(step), steps, [sample_of(step, place, f"answer {place} {text}") for place in range(4)])
    changed: dict[str, Any] = {"key": "guard.max_grad_norm", "old": BOUND, "new": BOUND_FROM_3, "by": text}
    record.event("setting_changed", step=3, **changed)
    record.event("bound_left", step=5, metric="train/grad_norm", value="0.05", bound=BOUND_FROM_3)
    record.event("reward_failed", step=1, examples={"KeyError": text})
    if ended:
        record.timeline(steps - 1, {"train": [0], "generation": [1]}, SPANS, {})
        record.event("end", step=steps)
    else:
        folder.failure_path(1).write_text(json.dumps({"rank": 1, "reason": f"ValueError: {text}"}))
    return folder
