"""Sampling and evaluation over all replicas: prompts are dealt out, answers and rewards are brought together."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hybrid3d import ranks
from hybrid3d.config import Recipe
from hybrid3d.rl.data import Example, PromptData
from hybrid3d.rl.rewards import find_reward, load_reward
from hybrid3d.rollout.engine import RolloutEngine


@dataclass(frozen=True)
class Sample:
    """One answer to one prompt, with the log-probability at which vLLM drew each token, and its reward.

    `weights` is the number of updates that the weights which it was drawn with have behind them.
    """

    prompt: str
    prompt_ids: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    answer: str
    reward: float
    weights: int


class Rollouts:
    """Draws samples with the weights that the engine has. Every rank calls every method together."""

    def __init__(self, recipe: Recipe, engine: RolloutEngine, tokenizer: Any, train: PromptData, held_out: PromptData):
        self._recipe = recipe
        self._engine = engine
        self._tokenizer = tokenizer
        self._train = train
        self._held_out = held_out
        self._reward = load_reward(find_reward(recipe.reward.name).target)

    @property
    def held_out_problems(self) -> int:
        return len(self._held_out.examples)

    def draw(self, step: int) -> list[Sample]:
        """The samples of a step, on every rank: `samples_per_prompt` in a row for each prompt.

        Raises:
            StaleWeights: the engine's weights are older than those of this step.
        """
        weights = self._engine.require(step)
        algorithm, run = self._recipe.algorithm, self._recipe.run
        examples = self._train.batch(step, algorithm.prompts_per_step)
        work = [
            (example, request_seed(run.seed, step, i, n))
            for i, example in self._mine(list(enumerate(examples)))
            for n in range(algorithm.samples_per_prompt)
        ]
        completions = self._engine.generate(
            [example.prompt_ids for example, _ in work], [seed for _, seed in work], self._tokenizer.eos_token_id
        )
        samples = [
            self._sample(example, completion.tokens, completion.logprobs, weights)
            for (example, _), completion in zip(work, completions, strict=True)
        ]
        return self._of_all_replicas(samples)

    def accuracy(self, step: int) -> float:
        """Share of held-out problems whose greedy answer gets full reward.

        Raises:
            StaleWeights: the engine's weights are older than those of this step.
        """
        weights = self._engine.require(step)
        examples = self._mine(list(self._held_out.examples))
        answers = self._engine.answer([example.prompt_ids for example in examples], self._tokenizer.eos_token_id)
        rewards = [self._sample(e, tokens, (), weights).reward for e, tokens in zip(examples, answers, strict=True)]
        everyone = self._of_all_replicas(rewards)
        return sum(reward == 1.0 for reward in everyone) / len(everyone)

    def _sample(self, example: Example, tokens: Sequence[int], logprobs: tuple[float, ...], weights: int) -> Sample:
        answer = self._tokenizer.decode(tokens, skip_special_tokens=True)
        reward = self._reward(answer, example.answer)
        return Sample(example.prompt, example.prompt_ids, tuple(tokens), logprobs, answer, reward, weights)

    def _mine(self, items: list) -> list:
        """This replica's consecutive share."""
        first, last = (len(items) * (self._engine.replica + i) // self._engine.replicas for i in (0, 1))
        return items[first:last]

    def _of_all_replicas(self, items: list) -> list:
        """Everyone's items, in the order in which they were dealt out: that of replicas, whichever ranks they are."""
        shares = ranks.gather((self._engine.replica, items) if self._engine.leads else None)
        return [item for _, share in sorted(filter(None, shares), key=lambda s: s[0]) for item in share]


def request_seed(seed: int, step: int, prompt: int, sample: int) -> int:
    """A seed of its own for every request, the same in every layout."""
    digest = hashlib.sha256(f"{seed}/{step}/{prompt}/{sample}".encode()).digest()
    return int.from_bytes(digest[:4], "little")
