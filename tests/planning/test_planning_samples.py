"""The bytes of samples that `plan` predicts, beside those of samples that are as long as a recipe allows."""

from __future__ import annotations

import json
import pickle
import random
from pathlib import Path

import numpy as np
import pytest

from hybrid3d.config import load_recipe
from hybrid3d.generation.engine import ExpertChoices
from hybrid3d.generation.samples import Sample, held_samples
from hybrid3d.planning.report import predict_samples

pytestmark = pytest.mark.engines  # `plan` imports both

ROOT = Path(__file__).resolve().parents[2]
PROMPT, TOKENS = 64, 256
LONGEST = [f"rollout.max_model_len={PROMPT + TOKENS}", f"rollout.max_new_tokens={TOKENS}"]
FEW = ["algorithm.prompts_per_step=2", "algorithm.samples_per_prompt=4", "train.micro_batch_size=1"]


def config_of(name: str) -> dict[str, object]:
    found: dict[str, object] = json.loads((ROOT / "recipes/models" / name / "config.json").read_text())
    return found


def longest_sample(seed: int, experts: ExpertChoices) -> Sample:
    rng = random.Random(seed)
    prompt, tokens = ([rng.randrange(65536, 150_000) for _ in range(count)] for count in (PROMPT, TOKENS))
    logprobs = tuple(-rng.random() for _ in tokens)
    text = "".join(rng.choices("abcdefgh ", k=4 * TOKENS))
    return Sample(
        *("p" * 4 * PROMPT, tuple(prompt), tuple(tokens), (True,) * TOKENS, logprobs, text, 1.0, (300,) * TOKENS),
        experts=experts,
    )


def test_answers_take_what_is_predicted() -> None:
    recipe = load_recipe(ROOT / "recipes/qwen2.5-7b.yaml", [*LONGEST, *FEW])
    found = predict_samples(recipe, config_of("qwen2.5-7b"))
    sent = len(pickle.dumps([longest_sample(seed, ExpertChoices()) for seed in range(8)]))
    assert found.answers == 8
    assert found.choice_bytes == 0
    assert sent <= found.answer_bytes <= 1.1 * sent


def test_rank_receives_no_own_answer_and_its_share_of_choices() -> None:
    recipe = load_recipe(ROOT / "recipes/qwen3-30b-a3b.yaml", [*LONGEST, *FEW, "train.router_replay=rollout"])
    config = config_of("qwen3-30b-a3b")
    found = predict_samples(recipe, config)
    layers, per_token = config["num_hidden_layers"], config["num_experts_per_tok"]
    choices = ExpertChoices.of(np.zeros((PROMPT + TOKENS - 1, layers, per_token), np.uint8))  # type: ignore[arg-type]
    assert found.choice_bytes == 8 * choices.nbytes
    held = held_samples([longest_sample(0, choices)], 0)
    assert len(pickle.dumps(held)) < found.answer_bytes / 8 + 500  # they stay where they are
    tp, ranks = recipe.rollout.tp, recipe.train_ranks
    own = found.answer_bytes // (ranks // tp)
    assert found.received.shape == (ranks,)
    assert found.received[0] == found.received[1] - own
    assert found.received[1] == found.answer_bytes + -(-found.choice_bytes // recipe.train.dp)


def test_ranks_that_only_generate_receive_none() -> None:
    recipe = load_recipe(ROOT / "recipes/deepseek-v3-671b-split.yaml")
    found = predict_samples(recipe, config_of("deepseek-v3-671b"))
    assert (found.received[: recipe.train_ranks] > 0).all()
    assert (found.received[recipe.train_ranks :] == 0).all()
