"""The results of generation: samples, a step's batch of them, and the tokens of an unfinished answer.

An answer is one sample or, where an agent made it, the samples of its branches in a row.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from hybrid3d.config import Rollout
from hybrid3d.generation.engine import NO_CHOICES, Array, Completion, ExpertChoices
from hybrid3d.rl.data import Example
from hybrid3d.scoring.scorer import Query

NO_BRANCH = -1  # of a row that only fills a batch
NO_ANSWER = -1  # the number of the answer of such a row
ARRAYS = {"prompt_ids": np.int32, "tokens": np.int32, "loss_mask": np.bool_, "logprobs": np.float32}  # of a sample


@dataclass(frozen=True)
class RunLengths:
    """Holds numbers that seldom change as runs (number, length), so that it takes as much memory as there are runs."""

    runs: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, numbers: Iterable[int]) -> RunLengths:
        """Return the same numbers as runs."""
        if isinstance(numbers, RunLengths):
            return numbers
        return cls(tuple((number, sum(1 for _ in run)) for number, run in itertools.groupby(map(int, numbers))))

    def __len__(self) -> int:
        return sum(length for _, length in self.runs)

    def __iter__(self) -> Iterator[int]:
        return itertools.chain.from_iterable(itertools.repeat(*run) for run in self.runs)


@dataclass(frozen=True, eq=False)
class Sample:
    """One answer to one prompt, and its reward once it is scored. Sequences of another type are converted.

    Attributes:
        reference: the data's answer to the prompt, with which a reward function compares.
        row: of the prompt in its file; None where it is not known.
        prompt_ids, tokens: int32, of the prompt and of the answer, what an environment wrote in it included.
        loss_mask: whether the policy generated each token.
        logprobs: float32, of the policy's tokens, by vLLM: of the distribution at the temperature, over all tokens.
        versions: for each token, the version of the weights that generated it (for an environment's, the turn before
            it): the number of updates behind them.
        scored: whether the reward is known; an agent may give it with its answer.
        branch: of an agent's answer, whose branches are samples in a row: 0 is the first. All have its reward.
            `NO_BRANCH` of what only fills a batch.
        last: whether it is the branch with the last reply, whose text and tokens are scored.
        truncated: whether the answer was cut: the engine ran out of tokens, or an environment's reply did not fit.
        baseline: the reward of a greedy answer to the prompt; 0 unless advantages need it.
        baseline_tokens: the number of tokens of that answer.
        kept_probability: of the tokens that could be sampled, mean over the policy's tokens.
        experts: that vLLM chose for the first tokens of prompt and answer, usually all but the last.
    """

    prompt: str
    prompt_ids: Array
    tokens: Array
    loss_mask: Array
    logprobs: Array
    answer: str
    reward: float
    versions: RunLengths
    reference: str = ""
    row: int | None = None
    scored: bool = False
    branch: int = 0
    last: bool = True
    truncated: bool = False
    baseline: float = 0.0
    baseline_tokens: int = 0
    kept_probability: float = 1.0
    experts: ExpertChoices = NO_CHOICES

    def __post_init__(self) -> None:
        for name, dtype in ARRAYS.items():
            object.__setattr__(self, name, np.asarray(getattr(self, name), dtype))
        object.__setattr__(self, "versions", RunLengths.of(self.versions))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sample):
            return NotImplemented
        names = [each.name for each in fields(self)]
        return all(np.array_equal(getattr(self, name), getattr(other, name)) for name in ARRAYS) and all(
            getattr(self, name) == getattr(other, name) for name in names if name not in ARRAYS
        )

    def emptied(self) -> Sample:
        """Return the sample without texts, tokens and choices of experts."""
        nothing: dict[str, Any] = {name: np.zeros(0, dtype) for name, dtype in ARRAYS.items()}
        nothing |= dict.fromkeys(("prompt", "answer", "reference"), "")
        return replace(self, **nothing, versions=RunLengths(()), experts=NO_CHOICES)

    @property
    def sequence(self) -> Array:
        """The tokens of prompt and answer, int32."""
        return np.concatenate([self.prompt_ids, self.tokens])

    @property
    def weight_version(self) -> int:
        """The version of the oldest weights that generated a token of it."""
        return min(version for version, _ in self.versions.runs)

    @property
    def num_loss_tokens(self) -> int:
        """How many tokens the policy generated."""
        return int(self.loss_mask.sum())

    @property
    def turns(self) -> int:
        """How many turns the policy had."""
        return int((np.diff(self.loss_mask.astype(np.int8), prepend=0) == 1).sum())


def answer_numbers(samples: Sequence[Sample]) -> list[int]:
    """Return the number of the answer that each sample is a branch of, counted from 0; `NO_ANSWER` of what fills."""
    counts = itertools.accumulate(int(sample.branch == 0) for sample in samples)
    pairs = zip(samples, counts, strict=True)
    return [NO_ANSWER if sample.branch == NO_BRANCH else count - 1 for sample, count in pairs]


def answers_of(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Return the branches of each answer."""
    numbered = zip(answer_numbers(samples), samples, strict=True)
    return [[sample for _, sample in of_answer] for _, of_answer in itertools.groupby(numbered, lambda pair: pair[0])]


def queries_of(answers: Sequence[Sequence[Sample]], per_prompt: int) -> list[Query]:
    """Return what a scorer is asked of answers, `per_prompt` of which in a row are to one prompt."""
    lasts = [next(branch for branch in branches if branch.last) for branches in answers]
    return [
        Query(
            answer=last.answer,
            reference=last.reference,
            prompt=last.prompt,
            row=last.row,
            prompt_ids=last.prompt_ids,
            tokens=last.tokens,
            prompt_number=number // per_prompt,
            given=last.reward if last.scored else None,
        )
        for number, last in enumerate(lasts)
    ]


def with_rewards(answers: Sequence[Sequence[Sample]], rewards: Sequence[float]) -> list[list[Sample]]:
    """Return answers with rewards, which all branches of an answer have."""
    pairs = zip(answers, rewards, strict=True)
    return [[replace(branch, reward=reward, scored=True) for branch in branches] for branches, reward in pairs]


def with_baselines(answers: Sequence[Sequence[Sample]], per_prompt: int) -> list[list[Sample]]:
    """Return answers with the reward and the length of the greedy one, which is the last to each prompt, without it."""
    found = []
    for start in range(0, len(answers), per_prompt):
        *sampled, (greedy, *_) = answers[start : start + per_prompt]
        reward, tokens = greedy.reward, len(greedy.tokens)
        found += [[replace(one, baseline=reward, baseline_tokens=tokens) for one in answer] for answer in sampled]
    return found


def filled_up(samples: Sequence[Sample], multiple: int) -> Sequence[Sample]:
    """Return samples whose number is a multiple, by adding rows of no answer, which have no loss tokens."""
    last = samples[-1]
    empty = replace(last, prompt_ids=last.prompt_ids[:1], tokens=last.tokens[:1], logprobs=last.logprobs[:0])
    mask, versions = np.zeros(1, np.bool_), RunLengths.of(itertools.islice(last.versions, 1))
    filling = replace(empty, loss_mask=mask, versions=versions, branch=NO_BRANCH, experts=last.experts.first(2))
    return [*samples, *[filling] * (-len(samples) % multiple)]


def held_samples(samples: Sequence[Sample], rank: int) -> list[Sample]:
    """Return samples whose choices of experts stay with this rank of the ranks that train, where they have any."""
    return [
        replace(sample, experts=replace(sample.experts, held_by=rank)) if len(sample.experts) else sample
        for sample in samples
    ]


@dataclass(frozen=True)
class RolloutBatch:
    """The samples of a step, on every rank.

    Attributes:
        samples: `samples_per_prompt` answers in a row for each prompt, those of agents with all their branches.
        batches: of prompts that were drawn for them.
        zero_variance_groups: groups whose rewards are all equal, over all that were drawn.
        failures: rewards that failed, and conversations that an environment failed in, by kind, over all that were
            drawn; `examples` has what one of each said.
        unfinished: places of the prompts that were drawn before and are not trained yet; None without partial rollouts.
        dropped_tokens: how many generated tokens were dropped since the batch before.
        greedy: the greedy answers, one to each prompt with all its branches, where the samples are not scored yet and
            need their rewards as baselines.
    """

    samples: list[Sample]
    batches: int = 1
    zero_variance_groups: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)
    unfinished: list[tuple[int, int]] | None = None
    dropped_tokens: int = 0
    greedy: list[Sample] = field(default_factory=list)

    def metrics(self, samples: Sequence[Sample], rollout: Rollout, version: int) -> dict[str, float]:
        """Return the metrics of the samples' lengths, turns, rewards and weights.

        Args:
            samples: these, with the rewards that training used.
            version: of the policy that is trained with them.
        """
        firsts = [sample for sample in samples if not sample.branch]
        staleness = [version - sample.weight_version for sample in samples]
        lengths = [len(sample.tokens) for sample in samples]
        truncated = sum(sample.truncated for sample in samples)
        found = {
            "reward/mean": sum(sample.reward for sample in firsts) / len(firsts),
            "rollout/response_tokens_mean": sum(lengths) / len(lengths),
            "rollout/response_tokens_max": max(lengths),
            "rollout/truncated_fraction": truncated / len(lengths),
            "rollout/staleness_mean": sum(staleness) / len(staleness),
            "rollout/staleness_max": max(staleness),
            "rollout/batches": self.batches,
            "rollout/zero_variance_groups": self.zero_variance_groups,
            "reward/failures": sum(self.failures.values()),
        }
        if rollout.truncations:
            own = [sample.num_loss_tokens for sample in samples]
            kept = sum(sample.kept_probability * count for sample, count in zip(samples, own, strict=True))
            found["rollout/kept_probability_mean"] = kept / max(1, sum(own))
        if rollout.environment is not None or rollout.agents is not None:
            others = sum(lengths) - sum(sample.num_loss_tokens for sample in samples)
            found["rollout/turns_mean"] = sum(sample.turns for sample in samples) / len(samples)
            found["rollout/environment_tokens_mean"] = others / len(samples)
        if rollout.agents is not None:
            found["rollout/branches_mean"] = len(samples) / len(firsts)
        if self.unfinished is not None:
            continued = sum(len(sample.versions.runs) > 1 for sample in samples)
            found["rollout/continued_fraction"] = continued / len(samples)
            found["rollout/unfinished_prompts"] = len(self.unfinished)
            found["rollout/dropped_tokens"] = self.dropped_tokens
        return found


@dataclass(eq=False, kw_only=True)
class AnswerTokens:
    """The tokens that follow a prompt: those that the policy generated, and what was written between them.

    Attributes:
        loss_mask: whether the policy generated each token.
        logprobs: of the policy's tokens, by vLLM; empty where it is greedy.
        kept: for each of them, the probability of the tokens that could be sampled; empty where all could.
        versions: of the weights that generated each token; the tokens of others have those of the token before.
        experts: of the first tokens of the prompt and of these.
        truncated: whether more would follow if there were room for it.
    """

    tokens: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    kept: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    experts: ExpertChoices = NO_CHOICES
    truncated: bool = False

    @property
    def generated(self) -> int:
        """How many tokens the policy has generated."""
        return sum(self.loss_mask)

    def append_generated(self, completion: Completion) -> None:
        """Append tokens that the policy generated."""
        self._append(completion.tokens, True, completion.weight_version)
        self.logprobs += completion.logprobs
        self.kept += completion.kept
        self.truncated = completion.truncated
        self.experts = self.experts.extended(completion.experts)  # where it was computed twice, the first time counts

    def append_written(self, tokens: Sequence[int]) -> None:
        """Append tokens that others wrote, after tokens of the policy."""
        self._append(tokens, False, self.versions[-1])

    def truncate(self, length: int) -> None:
        """Remove all tokens but the first `length`."""
        generated = sum(self.loss_mask[:length])
        del self.tokens[length:], self.loss_mask[length:], self.versions[length:]
        del self.logprobs[generated:], self.kept[generated:]

    def sample(
        self,
        example: Example,
        prompt_ids: Sequence[int],
        answer: str,
        reward: float | None = None,
        branch: int = 0,
        last: bool = True,
    ) -> Sample:
        """Return the sample of these tokens; arguments are as in `Sample`."""
        return Sample(
            prompt=example.prompt,
            prompt_ids=np.array(prompt_ids, np.int32),
            tokens=np.array(self.tokens, np.int32),
            loss_mask=np.array(self.loss_mask, np.bool_),
            logprobs=np.array(self.logprobs, np.float32),
            answer=answer,
            reward=0.0 if reward is None else reward,
            versions=RunLengths.of(self.versions),
            reference=example.answer,
            row=example.row,
            scored=reward is not None,
            branch=branch,
            last=last,
            truncated=self.truncated,
            kept_probability=sum(self.kept) / len(self.kept) if self.kept else 1.0,
            experts=self.experts.first(len(prompt_ids) + len(self.tokens)),  # of what a stop has left
        )

    def _append(self, tokens: Sequence[int], loss_mask: bool, version: int) -> None:
        self.tokens += tokens
        self.loss_mask += [loss_mask] * len(tokens)
        self.versions += [version] * len(tokens)
