"""Predicts the bytes of samples that ranks receive in a step: answers, and the experts that vLLM chose for them.

Answers are taken to be as long as the recipe allows, so that these are upper bounds. What is sent is pickled
(`generation/exchange.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from hybrid3d.config import Recipe
from hybrid3d.families import Config, family_of

# Bytes of a pickled token: its number, and its text
PROMPT_TOKEN = 4 + 4
# The same, its log-probability, and whether the policy generated it; the versions of weights are few
ANSWER_TOKEN = PROMPT_TOKEN + 4 + 1
ANSWER = 500  # of an answer besides its tokens
MANY_EXPERTS = 256  # more have numbers of two bytes


@dataclass(frozen=True)
class SampleTraffic:
    """The samples of a step.

    Attributes:
        answers: how many there are.
        answer_bytes: of all of them, without choices of experts.
        choice_bytes: of all choices of experts; 0 unless they are replayed.
        received: [ranks], what each rank receives.
    """

    answers: int
    answer_bytes: int
    choice_bytes: int
    received: np.ndarray


def predict_samples(recipe: Recipe, config: Config) -> SampleTraffic:
    """Predict what each rank receives of a step's samples, of one batch of prompts.

    Every rank that trains gets each answer once, except for those that it has generated for its replica, and the ranks
    of a data-parallel rank get the choices of experts of its share. Ranks that only generate get nothing.
    """
    rollout, algorithm = recipe.rollout, recipe.algorithm
    assert rollout is not None, "there is no sync to plan without"
    if not algorithm.generates:
        return SampleTraffic(0, 0, 0, np.zeros(recipe.sync_ranks, np.int64))
    answers = algorithm.prompts_per_step * (algorithm.samples_per_prompt + algorithm.uses_greedy_answers)
    tokens = min(rollout.max_new_tokens, rollout.max_model_len)
    prompt = rollout.max_model_len - tokens
    answer_bytes = answers * (ANSWER + prompt * PROMPT_TOKEN + tokens * ANSWER_TOKEN)
    experts = family_of(config).experts(config)
    choice_bytes = 0
    if recipe.train.router_replay == "rollout" and experts is not None:
        numbers = sum(experts.sparse) * experts.per_token * (1 if experts.count <= MANY_EXPERTS else 2)
        choice_bytes = answers * (rollout.max_model_len - 1) * numbers
    received = np.zeros(recipe.sync_ranks, np.int64)
    received[: recipe.train_ranks] = answer_bytes + math.ceil(choice_bytes / recipe.train.dp)
    if recipe.is_split:  # the first rank gets everything from the engines
        received[0] = answer_bytes + choice_bytes
    else:
        replicas = recipe.generation_ranks // rollout.tp
        own = answer_bytes // replicas
        received[_leading(recipe)] -= own
    return SampleTraffic(answers, answer_bytes, choice_bytes, received)


def _leading(recipe: Recipe) -> np.ndarray:
    """Return a rank of each replica; which one it is depends on the placement."""
    assert recipe.rollout is not None, "checked by the caller"
    return np.arange(0, recipe.generation_ranks, recipe.rollout.tp)
