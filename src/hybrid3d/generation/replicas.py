"""Replicas of the model that generates: what a step asks of them, and those whose ranks call it together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from hybrid3d.config import Recipe
from hybrid3d.generation.agents.rollout import AgentRollout
from hybrid3d.generation.agents.sessions import Session, last_answer, samples_of
from hybrid3d.generation.engine import NO_CHOICES, Engine, Sampling
from hybrid3d.generation.exchange import AnswerExchange
from hybrid3d.generation.multi_turn import MultiTurnRollout
from hybrid3d.generation.partial_rollout import PartialRollout, Place, Prompt
from hybrid3d.generation.samples import Sample, held_samples
from hybrid3d.generation.turns import Trajectory, Turns
from hybrid3d.rl.data import Example
from hybrid3d.rl.token_texts import decode_part
from hybrid3d.scoring.scorer import Scorer, Scores

T = TypeVar("T")

OF_ENVIRONMENT = "environment_"  # prefix of the kinds of failures of environments, not of rewards
OF_AGENT = "agent_"  # the same for agents

Work = tuple[Example, int | None]
"""A prompt to answer, with the seed of its answer; None answers greedily."""


class NoReplicas(RuntimeError):
    """There is no replica that can generate: all have been lost."""

    raised_on_all_ranks = True  # the first rank that trains sends it to the others


@dataclass(frozen=True)
class Answers:
    """The answers of one replica.

    Attributes:
        failures: rewards and environments that failed, by kind; `examples` has what one of each said.
    """

    samples: list[Sample]
    failures: dict[str, int] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Advanced:
    """How far a replica has come with its prompts.

    Attributes:
        answers: to the prompts that were taken, all answers to each in a row.
        unfinished: the prompts that it has still.
        dropped_tokens: how many generated tokens it has dropped since it was asked last.
    """

    answers: Answers
    unfinished: list[Place]
    dropped_tokens: int


class Replicas(Protocol):
    """Replicas that answer prompts, by number. Which there are may change between two calls.

    A replica that is lost during a call is not in the call's result, and no other replica ever has its number.
    """

    @property
    def numbers(self) -> Sequence[int]:
        """The replicas that can generate, ascending."""
        ...

    def answer(
        self, shares: Mapping[int, Sequence[Work]], version: int, sampling: Sampling, scored: bool
    ) -> Mapping[int, Answers]:
        """Answer each replica's share of the work, with weights of this version or a later one.

        Args:
            scored: use the recipe's reward; otherwise all rewards are 0, until a reward model replaces them.

        Raises:
            StaleWeights: the engine's weights are older, or a sync of them was interrupted.
        """
        ...

    def advance(
        self,
        prompts: Mapping[int, Sequence[Prompt]],
        wanted: Mapping[int, int] | None,
        version: int,
        sampling: Sampling,
        scored: bool,
        stop: Callable[[], bool] | None = None,
    ) -> Mapping[int, Advanced]:
        """Go on with the prompts of each replica, and with these more, as `PartialRollout` says.

        Args:
            wanted: how many prompts each replica is to complete and give back; None completes all that it has, or until
                `stop` returns True, and gives none back.

        Raises:
            StaleWeights: as for `answer`.
        """
        ...


class EngineReplicas:
    """Implements `Replicas` for the replicas of one engine. Every rank of it calls every method together."""

    def __init__(
        self,
        recipe: Recipe,
        engine: Engine,
        tokenizer: Any,
        group: dist.ProcessGroup,
        receivers: Sequence[int] | None = None,
    ):
        """
        Args:
            group: all ranks of the engine.
            receivers: ranks of the group for which results are, which are the same on each; on others they are
                incomplete. By default all, which then train: experts that vLLM chose stay with the rank that has them.
        """
        self._engine, self._tokenizer = engine, tokenizer
        self._exchange = AnswerExchange(group, recipe.machine.gpus_per_node, receivers)
        self._holder = group.rank() if receivers is None else None  # of the choices of experts
        self._turns = Turns(recipe, engine, tokenizer, group)
        self._multi_turn = MultiTurnRollout(self._turns, engine, group)
        reward = recipe.reward
        self._scorer = Scorer(reward.name, reward.workers, reward.timeout_seconds, reward.default)
        self._default_reward = reward.default
        self._reported = 0  # number of dropped tokens
        self._partial: PartialRollout | None = None
        self._agents: AgentRollout | None = None
        assert recipe.rollout is not None, "checked when the recipe was read"
        if recipe.rollout.agents is not None:
            self._agents = AgentRollout(recipe, engine, tokenizer)
        if recipe.async_.partial is not None:
            self._partial = PartialRollout(engine, self._turns, recipe.async_)

    @property
    def numbers(self) -> Sequence[int]:
        return range(self._engine.replicas)

    def answer(
        self, shares: Mapping[int, Sequence[Work]], version: int, sampling: Sampling, scored: bool
    ) -> Mapping[int, Answers]:
        if self._partial is not None:
            self._partial.end_requests()
        work = shares[self._engine.replica]
        examples, seeds = [example for example, _ in work], [seed for _, seed in work]
        if self._agents is not None:
            sessions = self._agents.run(examples, seeds, version, sampling)
            return self._of_all_replicas(self._scored_sessions(sessions))
        trajectories = self._multi_turn.run(examples, seeds, version, sampling)
        return self._of_all_replicas(self._scored(trajectories, scored))

    def advance(
        self,
        prompts: Mapping[int, Sequence[Prompt]],
        wanted: Mapping[int, int] | None,
        version: int,
        sampling: Sampling,
        scored: bool,
        stop: Callable[[], bool] | None = None,
    ) -> Mapping[int, Advanced]:
        assert self._partial is not None, "only partial rollouts advance"
        for prompt in prompts.get(self._engine.replica, ()):
            self._partial.add(prompt)
        taken: list[Trajectory] = []
        if wanted is None:
            self._partial.generate(version, len(self._partial.places), sampling, stop)
        else:
            count = wanted[self._engine.replica]
            self._partial.generate(version, count, sampling, stop)
            taken = [answer for group in self._partial.take(count, version) for answer in group.answers.values()]
        dropped, self._reported = self._partial.dropped_tokens - self._reported, self._partial.dropped_tokens
        return self._of_all_replicas(Advanced(self._scored(taken, scored), self._partial.places, dropped))

    def reset(self) -> None:
        """Drop the prompts that are being answered, as those who asked are lost."""
        if self._partial is not None:
            self._partial.reset()
            self._reported = self._partial.dropped_tokens

    def close(self) -> None:
        """End the processes that compute rewards and replies, and what agents connect to."""
        self._scorer.close()
        self._turns.close()
        if self._agents is not None:
            self._agents.close()

    def _scored(self, trajectories: Sequence[Trajectory], by_name: bool) -> Answers:
        """Return answers with their rewards; on the ranks that do not report for their replica none."""
        trajectories = trajectories if self._engine.leads else []
        answers = [decode_part(self._tokenizer, one.tokens, one.example.prompt_ids) for one in trajectories]
        queries = [
            (a, trajectory.example.answer, trajectory.example.prompt)
            for a, trajectory in zip(answers, trajectories, strict=True)
        ]
        rows = [trajectory.example.row for trajectory in trajectories]
        scores = self._scorer.score(queries).naming(rows) if by_name else Scores([0.0] * len(queries))
        samples = [
            trajectory.sample(trajectory.example, trajectory.example.prompt_ids, answer, reward)
            for trajectory, answer, reward in zip(trajectories, answers, scores.rewards, strict=True)
        ]
        failed = [(f"{OF_ENVIRONMENT}{one.failure}", one.message) for one in trajectories if one.failure]
        return self._answers(samples, failed, scores)

    def _scored_sessions(self, sessions: Sequence[Session]) -> Answers:
        """Return the answers of agents, with the rewards that these have given, or else those of the function."""
        answers = [samples_of(session, self._tokenizer) for session in sessions]
        rewards: list[float | None] = [
            self._default_reward if session.failure else session.reward for session in sessions
        ]
        missing = [i for i, reward in enumerate(rewards) if reward is None]
        scores = self._scorer.score(
            [
                (last_answer(sessions[i], answers[i]), sessions[i].example.answer, sessions[i].example.prompt)
                for i in missing
            ]
        ).naming([sessions[i].example.row for i in missing])
        given = iter(scores.rewards)
        whole = [next(given) if reward is None else reward for reward in rewards]
        samples = [
            replace(sample, reward=reward)
            for reward, branches in zip(whole, answers, strict=True)
            for sample in branches
        ]
        failed = [(f"{OF_AGENT}{session.failure}", session.message) for session in sessions if session.failure]
        return self._answers(samples, failed, scores)

    def _answers(self, samples: list[Sample], failed: Sequence[tuple[str, str]], scores: Scores) -> Answers:
        """Return samples with the failures of their conversations (kind and message) and of their rewards."""
        failures = Counter(kind for kind, _ in failed)
        samples = samples if self._holder is None else held_samples(samples, self._holder)
        return Answers(samples, dict(failures | scores.failures), dict(reversed(failed)) | scores.examples)

    def _of_all_replicas(self, value: T) -> dict[int, T]:
        """Return the values of all replicas, by number; each replica's is that of its leading rank."""
        return self._exchange.gather(self._engine.replica, value if self._engine.leads else None)


Score = Callable[[Sequence[Sample], bool], Scores]
"""Returns the rewards of samples: by the reward model, or else by the function."""


class ScoredReplicas:
    """Implements `Replicas` where other ranks compute the rewards of what these replicas answer."""

    def __init__(self, replicas: Replicas, score: Score):
        self._replicas, self._score = replicas, score

    @property
    def numbers(self) -> Sequence[int]:
        return self._replicas.numbers

    def answer(
        self, shares: Mapping[int, Sequence[Work]], version: int, sampling: Sampling, scored: bool
    ) -> Mapping[int, Answers]:
        return self._scored(self._replicas.answer(shares, version, sampling, False), not scored)

    def advance(
        self,
        prompts: Mapping[int, Sequence[Prompt]],
        wanted: Mapping[int, int] | None,
        version: int,
        sampling: Sampling,
        scored: bool,
        stop: Callable[[], bool] | None = None,
    ) -> Mapping[int, Advanced]:
        found = self._replicas.advance(prompts, wanted, version, sampling, False, stop)
        answers = self._scored({number: advanced.answers for number, advanced in found.items()}, not scored)
        return {number: replace(advanced, answers=answers[number]) for number, advanced in found.items()}

    def _scored(self, answers: Mapping[int, Answers], by_model: bool) -> dict[int, Answers]:
        samples = [sample for found in answers.values() for sample in found.samples]
        scores = self._score([replace(sample, experts=NO_CHOICES) for sample in samples], by_model)
        rewards, scored = iter(scores.rewards), dict[int, Answers]()
        for number, found in answers.items():
            samples = [replace(sample, reward=next(rewards)) for sample in found.samples]
            scored[number] = replace(found, samples=samples)
        if scores.failures:  # which are counted over all replicas
            number, found = next(iter(scored.items()))
            failures, examples = found.failures | scores.failures, found.examples | scores.examples
            scored[number] = replace(found, failures=failures, examples=examples)
        return scored
