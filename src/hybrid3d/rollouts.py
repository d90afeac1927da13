"""Sampling and evaluation over all replicas: prompts are dealt out, answers and rewards are brought together."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hybrid3d import ranks
from hybrid3d.config import Recipe
from hybrid3d.rl.data import Example, PromptData
from hybrid3d.rl.scoring import Scorer, Scores
from hybrid3d.rollout.engine import Completion, RolloutEngine


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


@dataclass(frozen=True)
class Drawn:
    """The samples of a step, on every rank.

    Attributes:
        samples: `samples_per_prompt` in a row for each prompt.
        batches: of prompts that were drawn for them.
        dull: groups whose rewards are all alike, over all that were drawn.
        failures: rewards that failed, by kind, over all that were drawn; `examples` has what one of each said.
    """

    samples: list[Sample]
    batches: int
    dull: int
    failures: dict[str, int] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)


class FailedRewards(RuntimeError):
    """More rewards of a step failed than the recipe allows."""

    alike = True  # every rank raises it: one of them is enough to tell


class Rollouts:
    """Draws samples with the weights that the engine has. Every rank calls every method together."""

    def __init__(self, recipe: Recipe, engine: RolloutEngine, tokenizer: Any, train: PromptData, held_out: PromptData):
        self._recipe = recipe
        self._engine = engine
        self._tokenizer = tokenizer
        self._train = train
        self._held_out = held_out
        reward = recipe.reward
        self._scorer = Scorer(reward.name, reward.workers, reward.timeout_seconds, reward.default)

    @property
    def held_out_problems(self) -> int:
        return len(self._held_out.examples)

    def draw(self, step: int, batch: int, further: int = 0) -> Drawn:
        """The samples of a step.

        Groups of a prompt's samples whose rewards are all alike teach nothing: up to `further` batches of prompts are
        drawn for others in their place (DAPO, arXiv 2503.14476, section 3.2). What is then still missing, they fill up.

        Args:
            step: whose weights the engine must have.
            batch: number of the first batch of prompts.

        Raises:
            StaleWeights: the engine's weights are older than those of this step.
            FailedRewards: more than `reward.max_failures` of the samples' rewards failed.
        """
        wanted, group = self._recipe.algorithm.prompts_per_step, self._recipe.algorithm.samples_per_prompt
        found: list[list[Sample]] = []
        fillers: list[list[Sample]] = []
        failures: Counter[str] = Counter()
        examples: dict[str, str] = {}
        batches = dull = 0
        while len(found) < wanted and batches <= further:
            samples, scores = self._draw_batch(step, batch + batches)
            for one in scores:
                failures.update(one.failures)
                examples = {**one.examples, **examples}
            for one in (samples[start : start + group] for start in range(0, len(samples), group)):
                alike = group > 1 and all(sample.reward == one[0].reward for sample in one)
                (fillers if alike and further else found).append(one)
                dull += alike
            batches += 1
        self._check(failures, examples, batches * wanted * group)
        chosen = [*found, *fillers][:wanted]
        return Drawn([sample for one in chosen for sample in one], batches, dull, dict(failures), examples)

    def _check(self, failures: Mapping[str, int], examples: Mapping[str, str], samples: int) -> None:
        failed, allowed = sum(failures.values()), self._recipe.reward.max_failures
        if failed > allowed * samples:
            kinds = ", ".join(f"{count} {kind} ({examples[kind]})" for kind, count in sorted(failures.items()))
            raise FailedRewards(
                f"{failed} of {samples} rewards failed: {kinds}; reward.max_failures={allowed:g} allows "
                f"{int(allowed * samples)}: mend {self._recipe.reward.name}, or raise reward.timeout_seconds"
            )

    def _draw_batch(self, step: int, batch: int) -> tuple[list[Sample], list[Scores]]:
        weights = self._engine.require(step)
        algorithm, run = self._recipe.algorithm, self._recipe.run
        examples = self._train.batch(batch, algorithm.prompts_per_step)
        work = [
            (example, request_seed(run.seed, batch, i, n))
            for i, example in self._mine(list(enumerate(examples)))
            for n in range(algorithm.samples_per_prompt)
        ]
        completions = self._engine.generate(
            [example.prompt_ids for example, _ in work], [seed for _, seed in work], self._tokenizer.eos_token_id
        )
        return self._scored([example for example, _ in work], completions, weights)

    def accuracy(self, step: int) -> float:
        """Share of held-out problems whose greedy answer gets full reward.

        Raises:
            StaleWeights: the engine's weights are older than those of this step.
        """
        weights = self._engine.require(step)
        examples = self._mine(list(self._held_out.examples))
        answers = self._engine.answer([example.prompt_ids for example in examples], self._tokenizer.eos_token_id)
        samples, _ = self._scored(examples, [Completion(tuple(tokens), ()) for tokens in answers], weights)
        return sum(sample.reward == 1.0 for sample in samples) / len(samples)

    def close(self) -> None:
        """End the processes that compute rewards."""
        self._scorer.close()

    def _scored(
        self, examples: Sequence[Example], completions: Sequence[Completion], weights: int
    ) -> tuple[list[Sample], list[Scores]]:
        """Everyone's samples, and what the replicas' rewards say of themselves: one rank of each scores its own."""
        answers = [self._tokenizer.decode(c.tokens, skip_special_tokens=True) for c in completions]
        asked = [(a, example.answer, example.prompt) for a, example in zip(answers, examples, strict=True)]
        scores = self._scorer.score(asked if self._engine.leads else [])
        samples = [
            Sample(example.prompt, example.prompt_ids, completion.tokens, completion.logprobs, answer, reward, weights)
            for example, completion, answer, reward in zip(examples, completions, answers, scores.rewards, strict=False)
        ]
        return self._of_all_replicas(samples), self._of_all_replicas([scores])

    def _mine(self, items: list) -> list:
        """This replica's consecutive share."""
        first, last = (len(items) * (self._engine.replica + i) // self._engine.replicas for i in (0, 1))
        return items[first:last]

    def _of_all_replicas(self, items: list) -> list:
        """Everyone's items, in the order in which they were dealt out: that of replicas, whichever ranks they are."""
        shares = ranks.gather((self._engine.replica, items) if self._engine.leads else None)
        return [item for _, share in sorted(filter(None, shares), key=lambda s: s[0]) for item in share]


def request_seed(seed: int, batch: int, prompt: int, sample: int) -> int:
    """A seed of its own for every request, the same in every layout."""
    digest = hashlib.sha256(f"{seed}/{batch}/{prompt}/{sample}".encode()).digest()
    return int.from_bytes(digest[:4], "little")
