"""PPO through the real commands: a critic, a reward model, several updates a step, packed; and resumed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from commands import ROOT, demo_folder, hybrid3d, read_events, read_rows, without
from hybrid3d.scoring.code import sandbox

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1500)]

STEPS, RESUMED_FROM = 3, 1  # in the first the critic alone learns: the policy is saved before its first update


def make_judge(model: Path, out: Path) -> None:
    """A sequence classifier of one label on top of a language model, by `transformers` itself."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    torch.manual_seed(0)
    judge = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1, dtype=torch.float32)
    torch.nn.init.normal_(judge.score.weight)
    judge.save_pretrained(out)
    AutoTokenizer.from_pretrained(model).save_pretrained(out)


@pytest.fixture(scope="module")
def work(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = demo_folder(tmp_path_factory.mktemp("ppo"), demo)
    make_judge(demo / "base", work / "judge")
    held_out = pq.read_table(demo / "eval.parquet").slice(0, 16)
    tests = pa.array(['{"tests": "assert answer == 1"}'] * 16)
    pq.write_table(
        held_out.set_column(held_out.column_names.index("answer"), "answer", tests), work / "programs.parquet"
    )
    return work


SETTINGS = [
    str(ROOT / "recipes/demo-cpu.yaml"),
    "model.path=build/demo/base",
    f"run.steps={STEPS}",
    f"run.checkpoint_every={RESUMED_FROM}",
    "run.eval_every=9",
    "train.packed=true",
    "train.micro_batch_size=16",
    "reward.model=judge",
    "reward.name=code",  # of held-out answers alone
    "data.eval=programs.parquet",
    "algorithm.name=ppo",
    "algorithm.prompts_per_step=16",
    "algorithm.epochs=2",
    "algorithm.minibatches=2",
    "algorithm.entropy_coef=0.001",
    "algorithm.kl={where: reward, estimator: k1, coef: 0.01, target: 0.001, horizon: 1000}",
    "critic.optimizer={lr: 1.0e-3}",
    "critic.warmup_steps=1",
    "optimizer.warmup_steps=1",
    "guard.min_entropy=100",
    "run.async_checkpoints=true",
]


@pytest.fixture(scope="module")
def rows(work: Path) -> list[dict[str, Any]]:
    hybrid3d(work, "train", *SETTINGS, "name=whole")
    return read_rows(work / "runs/whole")


def test_rewards_are_what_transformers_says(work: Path, rows: list[dict[str, Any]]) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    judge = AutoModelForSequenceClassification.from_pretrained(work / "judge", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(work / "judge")
    samples = [json.loads(line) for line in (work / "runs/whole/samples.jsonl").read_text().splitlines()]
    assert len({sample["reward"] for sample in samples}) > 4
    for sample in samples:
        tokens = torch.tensor([sample["prompt_tokens"] + sample["answer_tokens"]])
        assert tokenizer.decode(sample["answer_tokens"], skip_special_tokens=True) == sample["answer"]
        with torch.no_grad():
            hidden = judge.model(tokens).last_hidden_state[:, -1]
        assert sample["reward"] == pytest.approx(judge.score(hidden).item(), abs=1e-4)


def test_policy_and_critic_are_updated(rows: list[dict[str, Any]]) -> None:
    for row in rows[:-1]:
        assert row["critic/grad_norm"] > 0
        assert row["critic/lr"] == pytest.approx(1e-3)
    for row in rows[1:-1]:
        assert row["train/grad_norm"] > 0
        assert row["train/ratio"] != 1  # later updates of a step are of a policy that has moved
        assert 5 < row["train/entropy"] < 6.4  # of a model that knows nothing yet; log 600 at most
    assert "train/grad_norm" not in rows[0]
    assert [row["train/lr"] for row in rows[1:-1]] == pytest.approx([1e-4, 2e-4])  # its own warm-up begins then
    assert [row["train/answer_kl"] for row in rows[:2]] == pytest.approx([0, 0], abs=1e-4)
    assert rows[-1]["train/answer_kl"] != rows[0]["train/answer_kl"]
    coefs = [row["train/kl_coef"] for row in rows]
    assert coefs[0] == coefs[1] == 0.01 != coefs[2] != coefs[3]


def test_programs_are_judged_in_a_sandbox(work: Path, rows: list[dict[str, Any]]) -> None:
    events = read_events(work / "runs/whole")
    (told,) = [event for event in events if event["event"] == "sandbox"]
    assert told["confined_by"] == sandbox.protection()
    assert [event for event in events if event["event"] == "reward_failed"] == []
    assert 0 <= rows[0]["eval/accuracy"] <= 1


def test_bound_that_is_left_is_told_once(work: Path, rows: list[dict[str, Any]]) -> None:
    events = read_events(work / "runs/whole")
    (told,) = [event for event in events if event["event"] == "bound_left"]
    assert (told["metric"], told["bound"], told["step"]) == ("train/entropy", 100, 1)


@pytest.mark.slow
def test_resumed_with_its_critic_and_its_coefficient(work: Path, rows: list[dict[str, Any]]) -> None:
    shutil.copytree(work / "runs/whole", work / "again/whole")
    for updates in range(RESUMED_FROM + 1, STEPS + 1):
        shutil.rmtree(work / f"again/whole/checkpoints/step-{updates:06d}")
    recipe = work / "again/whole/recipe.yaml"
    recipe.write_text(recipe.read_text().replace("dir: runs", "dir: again"))
    hybrid3d(work, "train", *SETTINGS, "name=whole", "run.dir=again")
    assert without(read_rows(work / "again/whole")) == without(rows)
