"""Conversations in a real run: an environment's words are in the context of both engines, and no lesson of any."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

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
HELD_OUT = 32


@pytest.fixture(scope="module")
def run(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of a model whose weights are random and wide, so that every token of the context matters."""
    work = tmp_path_factory.mktemp("conversing")
    experts_folder(work, demo, "qwen2")
    (work / "mine.py").write_text(MINE)
    pq.write_table(pq.read_table(demo / "eval.parquet").slice(0, HELD_OUT), work / "eval.parquet")
    hybrid3d(
        work,
        "train",
        str(ROOT / "recipes/demo-cpu.yaml"),
        *EXPERTS,
        "name=turns",
        "run.steps=2",
        "algorithm.prompts_per_step=8",
        "algorithm.samples_per_prompt=4",
        "data.eval=eval.parquet",
        "rollout.environment=mine:listener",
        f"rollout.max_new_tokens={MAX_NEW_TOKENS}",
        "reward.name=mine:length",
    )
    return work / "runs/turns"


def samples_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]


def test_engines_agree_on_every_token_of_the_policy(run: Path) -> None:
    """A word more or less in the context, or a token out of its place, would show in what follows."""
    for row in read_rows(run):
        assert 0 < row["mismatch/logprob_abs_max"] <= 1e-3
        assert row["reward/failures"] == 0


def test_words_are_in_the_answers_in_their_order(run: Path) -> None:
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


@pytest.mark.slow
def test_held_out_answers_are_conversations_too(run: Path) -> None:
    """Those that transformers holds greedily, token by token, with the weights that the run began with."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    work, mine = run.parents[1], {}
    exec(MINE, mine)
    model, tokenizer = (kind.from_pretrained(work / "model") for kind in (AutoModelForCausalLM, AutoTokenizer))

    def answer(prompt: str) -> str:
        tokens, turns = tokenizer.encode(prompt), []
        first = begin = len(tokens)
        while (room := MAX_NEW_TOKENS - (len(tokens) - first)) > 0:
            with torch.no_grad():
                tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
            ended, text = tokens[-1] == tokenizer.eos_token_id, tokenizer.decode(tokens[-1:], skip_special_tokens=True)
            if room == 1 or not (ended or any(stop in text for stop in mine["listener"].stops)):
                continue
            turn = tokenizer.decode(tokens[begin:], skip_special_tokens=True)
            words = mine["listener"]([*turns, turn], "", prompt)
            heard = tokenizer.encode(words or "", add_special_tokens=False)
            if words is None or len(heard) >= room - 1 or (ended and not heard):
                break
            if heard:
                tokens, turns, begin = tokens + heard, [*turns, turn, words], len(tokens) + len(heard)
        return tokenizer.decode(tokens[first:], skip_special_tokens=True)

    prompts = pq.read_table(work / "eval.parquet")["question"].to_pylist()
    right = sum(mine["length"](answer(prompt), "", prompt) == 1.0 for prompt in prompts)
    assert 0 < right < HELD_OUT
    assert read_rows(run)[0]["eval/accuracy"] == right / HELD_OUT
