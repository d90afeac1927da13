"""Whoever answers, and whoever scores: real runs on four ranks, whose rewards transformers and functions give too."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from commands import ROOT, demo_folder, hybrid3d, read_rows
from hybrid3d.generation.samples import Sample
from hybrid3d.replay.step_record import StepRecord, read_step
from hybrid3d.run.folder import RunFolder, recorded_folder
from reference import classifier_of, save_classifier
from servers import free_ports_in_a_row

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

ROWS, GIVEN = 16, 0.25
LENGTH = "def length(answer, reference, prompt):\n    return float(len(answer))\n"


@pytest.fixture(scope="module")
def work(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a reward model and a function, and with the same prompts for training and evaluation."""
    work = demo_folder(tmp_path_factory.mktemp("scorers"), demo)
    save_classifier(demo / "base", work / "judge")
    for file in (demo / "base").glob("*token*"):
        shutil.copy(file, work / "judge")
    pq.write_table(pq.read_table(demo / "train.parquet").slice(0, ROWS), work / "few.parquet")
    (work / "rewards.py").write_text(LENGTH)
    return work


def train(work: Path, name: str, *settings: str) -> tuple[dict[str, Any], StepRecord]:
    """Return the metrics and the record of the first step of a run in which each prompt has a greedy answer too."""
    of_all = ["model.path=build/demo/base", "model.dtype=float32", "data.train=few.parquet", "data.eval=few.parquet"]
    of_all += ["reward.name=rewards:length", "reward.max_failures=0.5", "algorithm.name=remax", "run.steps=1"]
    of_all += [f"algorithm.prompts_per_step={ROWS}", "algorithm.samples_per_prompt=2", "run.record=always"]
    of_all += ["rollout.max_new_tokens=24", "train.micro_batch_size=4", "run.checkpoint_every=0"]
    hybrid3d(work, "train", str(ROOT / "recipes/demo-cpu.yaml"), f"name={name}", *of_all, *settings, also=work)
    run = work / "runs" / name
    return read_rows(run)[0], read_step(recorded_folder(RunFolder(run), 0))


def agent(*arguments: object) -> tuple[str, str]:
    command = " ".join(map(str, [sys.executable, ROOT / "tests/jobs/two_branches.py", *arguments]))
    return f"rollout.agents.command={command}", f"rollout.agents.port={free_ports_in_a_row(4)}"


def said_by_judge(work: Path, samples: list[Sample]) -> list[float]:
    """Return what transformers computes."""
    judge = classifier_of(work / "judge").eval()
    with torch.no_grad():
        return [float(judge(torch.tensor([[*one.prompt_ids, *one.tokens]])).logits[0, 0]) for one in samples]


def lengths(work: Path, samples: list[Sample]) -> list[float]:
    """Return what the function says of the texts."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(work / "build/demo/base")
    return [float(len(tokenizer.decode(one.tokens, skip_special_tokens=True))) for one in samples]


def check_rewards(record: StepRecord, scores: list[float]) -> None:
    """Check that each answer has the reward that its agent gave, or else its last branch's score, on all branches."""
    last = [one for one in record.samples if one.last]
    rewards = [GIVEN if one.scored and one.reward == GIVEN else score for one, score in zip(last, scores, strict=True)]
    numbers = np.cumsum([not one.branch for one in record.samples]) - 1
    assert record.rewards.tolist() == pytest.approx([rewards[number] for number in numbers], abs=1e-4)


def test_agents_whose_answers_a_reward_model_scores(work: Path) -> None:
    """Where they give no reward; a greedy session gives each prompt's baseline."""
    row, record = train(work, "agents-judged", *agent(GIVEN), "reward.model=judge")
    last = [one for one in record.samples if one.last]
    assert [one.branch for one in record.samples] == [0, 1] * (2 * ROWS)
    assert sum(one.scored for one in last) == ROWS
    check_rewards(record, said_by_judge(work, last))
    greedy = [one for one in record.greedy if one.last]
    scores = [GIVEN if one.scored else score for one, score in zip(greedy, said_by_judge(work, greedy), strict=True)]
    assert row["reward/greedy_mean"] == pytest.approx(fmean(scores), abs=1e-4)
    assert sum(one.scored for one in greedy) == ROWS / 2


@pytest.mark.slow
def test_agents_whose_answers_other_ranks_score(work: Path) -> None:
    row, record = train(work, "agents-apart", *agent(), "roles.reward.ranks=1", "machine.gpus_per_node=8")
    last = [one for one in record.samples if one.last]
    check_rewards(record, lengths(work, last))
    assert row["reward/greedy_mean"] == pytest.approx(row["eval/reward"])  # of the same prompts, and as greedy


@pytest.mark.slow
def test_greedy_baselines_that_a_reward_model_scores(work: Path) -> None:
    """In the memory of the models that are trained, and on ranks of its own; a recorded step has the greedy answers."""
    row, record = train(work, "greedy-judged", "reward.model=judge")
    check_rewards(record, said_by_judge(work, [*record.samples]))
    baselines = said_by_judge(work, [*record.greedy])
    assert row["reward/greedy_mean"] == pytest.approx(fmean(baselines), abs=1e-4)
    assert row["eval/reward"] == pytest.approx(fmean(lengths(work, [*record.greedy])))
    ends = np.cumsum([one.num_loss_tokens for one in record.samples])
    advantages = record.token_values["advantages"][ends - 1]
    expected = record.rewards - np.repeat(baselines, 2)
    assert advantages == pytest.approx(expected, abs=1e-4)
    assert "equal bit for bit" in hybrid3d(work, "replay", "runs/greedy-judged", "--step", "0", also=work)
    more = ("reward.model=judge", "roles.reward.ranks=2", "roles.reward.tp=2", "machine.gpus_per_node=8")
    apart, of_apart = train(work, "greedy-judged-apart", *more)
    assert apart["reward/greedy_mean"] == pytest.approx(row["reward/greedy_mean"], abs=1e-4)
    assert of_apart.rewards == pytest.approx(record.rewards, abs=1e-4)


@pytest.mark.slow
def test_greedy_baselines_that_other_ranks_score_or_that_are_interrupted(work: Path) -> None:
    """With partial rollouts a step trains the prompts that are complete first: each has the baseline that it has."""
    row, record = train(work, "greedy-apart", "roles.reward.ranks=1", "machine.gpus_per_node=8")
    check_rewards(record, lengths(work, [*record.samples]))
    assert row["reward/greedy_mean"] == pytest.approx(row["eval/reward"])
    more = ("async.partial=continue", "async.max_staleness=1", "algorithm.correction.kind=truncate")
    _, partial = train(work, "greedy-partial", *more)
    check_rewards(partial, lengths(work, [*partial.samples]))
    baselines = {tuple(one.prompt_ids): one.baseline for one in record.samples}
    assert len(baselines) == ROWS
    assert [one.baseline for one in partial.samples] == [baselines[tuple(one.prompt_ids)] for one in partial.samples]
