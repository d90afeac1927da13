"""Ten steps of real runs, with answers of vLLM, are done again bit for bit without it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from commands import EXPERTS, ROOT, demo_folder, experts_folder, hybrid3d, read_rows

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(1500)]

STEPS = 10
REWARDS = "def parity(answer, reference, prompt):\n    return float(sum(answer.encode()) % 2)\n"
DENSE = [
    *("model.path=build/demo/base", "train.tp=2", "train.pp=1", "rollout.tp=1", "train.micro_batch_size=8"),
    "rollout.kv_cache_gib=0.0625",
]
SPARSE = [*EXPERTS, "train.tp=1", "train.pp=1", "train.dp=2", "train.ep=2", "rollout.tp=1"]
GRPO = ["algorithm.name=grpo"]
PPO = [
    *("algorithm.name=ppo", "algorithm.epochs=2", "algorithm.minibatches=2", "critic.optimizer={lr: 1.0e-3}"),
    "algorithm.kl={where: reward, estimator: k1, coef: 0.01, target: 0.001, horizon: 1000}",
]
SPLIT = ["roles.generation.ranks=1", "async.max_staleness=1", "algorithm.correction.kind=truncate"]


def train(work: Path, *settings: str) -> None:
    (work / "rewards.py").write_text(REWARDS)
    common = [f"run.steps={STEPS}", "run.eval_every=100", "run.record=always", "guard.initial_mismatch=ignore"]
    common += ["algorithm.prompts_per_step=8", "algorithm.samples_per_prompt=4", "reward.name=rewards:parity"]
    hybrid3d(work, "train", str(ROOT / "recipes/demo-cpu.yaml"), "name=run", *common, *settings, also=work)


def replayed(work: Path, *layout: str) -> dict[str, Any]:
    hybrid3d(work, "replay", "runs/run", "--step", str(STEPS - 1), *layout)
    found: dict[str, Any] = json.loads((work / f"runs/run/replay/step-{STEPS - 1:06d}.json").read_text())
    return found


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
@pytest.mark.parametrize("kind", ["dense", "experts", "split"])
def test_ten_steps_are_done_again_bit_for_bit(kind: str, algorithm: str, demo: Path, tmp_path: Path) -> None:
    if kind == "experts":
        experts_folder(tmp_path, demo, "qwen3_moe")
    else:
        demo_folder(tmp_path, demo)
    layout = SPARSE if kind == "experts" else [*DENSE, *(SPLIT if kind == "split" else [])]
    train(tmp_path, *layout, *(GRPO if algorithm == "grpo" else PPO))
    assert all(row["train/grad_norm"] > 0 for row in read_rows(tmp_path / "runs/run")[:-1])
    found = replayed(tmp_path)
    assert (found["start"], found["equal"], found["same_layout"]) == (0, True, True)
    other = replayed(tmp_path, "train.tp=1", "train.ep=1", "train.dp=1")
    assert (other["as_recorded"], other["same_layout"]) == (True, False)
