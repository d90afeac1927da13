"""Conversations in a real run: an environment's words are in the context of both engines, and no lesson of any."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from commands import EXPERTS, ROOT, experts_folder, hybrid3d, read_rows

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

MINE = """\
def listener(turns, reference, prompt):
    if not prompt or turns[-1].endswith("e"):
        return ""
    return None if len(turns) > 5 else " [Ada heard %d] " % (len(turns) // 2)

listener.stops = ("a", "e", "1")

def length(answer, reference, prompt):
    return float(len(answer) % 5)
"""
WORDS = " [Ada heard {}] "
MAX_NEW_TOKENS = 48


@pytest.fixture(scope="module")
def run(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of a model whose weights are random and wide, so that every token of the context matters."""
    work = tmp_path_factory.mktemp("conversing")
    experts_folder(work, demo, "qwen2")
    (work / "mine.py").write_text(MINE)
    hybrid3d(
        work,
        "train",
        str(ROOT / "recipes/demo-cpu.yaml"),
        *EXPERTS,
        "name=turns",
        "run.steps=2",
        "algorithm.prompts_per_step=8",
        "algorithm.samples_per_prompt=4",
        "rollout.environment=mine:listener",
        f"rollout.max_new_tokens={MAX_NEW_TOKENS}",
        "reward.name=mine:length",
    )
    return work / "runs/turns"


def samples_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]


def test_both_engines_agree_on_every_token_of_the_policy(run: Path) -> None:
    """A word more or less in the context, or a token out of its place, would show in what follows."""
    for row in read_rows(run):
        assert 0 < row["mismatch/logprob_abs_max"] <= 1e-3
        assert row["reward/failures"] == 0


def test_the_words_are_in_the_answers_in_their_order(run: Path) -> None:
    answers = [sample["answer"] for sample in samples_of(run)]
    assert any(WORDS.format(1) in answer for answer in answers)
    for answer in answers:
        heard = [answer.find(WORDS.format(number)) for number in range(3)]
        assert heard == sorted(place for place in heard if place >= 0) + [place for place in heard if place < 0]


def test_means_are_over_the_policys_tokens_alone(run: Path) -> None:
    """Before its first update in a step a policy's ratio is 1 at each of its tokens; others would make it another."""
    for row in read_rows(run):
        assert 1 < row["rollout/turns_mean"] <= 4
        assert 5 < row["rollout/environment_tokens_mean"] < row["rollout/response_tokens_mean"]
        assert row["rollout/response_tokens_max"] <= MAX_NEW_TOKENS
    for row in read_rows(run)[:-1]:
        assert row["train/ratio"] == pytest.approx(1.0, abs=1e-5)
        assert row["train/grad_norm"] > 0
