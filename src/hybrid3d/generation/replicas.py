"""Replicas of the model that generates: what a step asks of them, and those whose ranks call it together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from hybrid3d.config import Recipe
from hybrid3d.generation.agents.rollout import AgentRollout
from hybrid3d.generation.agents.sessions import Session, samples_of
from hybrid3d.generation.engine import Engine, Sampling
from hybrid3d.generation.exchange import AnswerExchange
from hybrid3d.generation.multi_turn import MultiTurnRollout
from hybrid3d.generation.partial_rollout import PartialRollout, Place, Prompt
from hybrid3d.generation.samples import Sample, held_samples
from hybrid3d.generation.turns import Trajectory, Turns
from hybrid3d.rl.data import Example
from hybrid3d.rl.token_texts import decode_part
from hybrid3d.scoring.function_scorer import FunctionScorer
from hybrid3d.scoring.scorer import Query, Scores, ask_all, by_prompt, together

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
    """The answers of one replica, which are not scored yet.

    Attributes:
        failures: conversations that an environment or an agent failed in, by kind; `examples` has what one of each
            said.
    """

    samples: list[Sample]
    failures: dict[str, int] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class PartialAnswers:
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

    def answer(self, shares: Mapping[int, Sequence[Work]], version: int, sampling: Sampling) -> Mapping[int, Answers]:
        """Answer each replica's share of the work, with weights of this version or a later one.

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
        stop: Callable[[], bool] | None = None,
    ) -> Mapping[int, PartialAnswers]:
        """Go on with the prompts of each replica, and with these more, as `PartialRollout` says.

        Args:
            wanted: how many prompts each replica is to complete and give back; None completes all that it has, or until
                `stop` returns True, and gives none back.

        Raises:
            StaleWeights: as for `answer`.
        """
        ...

    def score(self, shares: Mapping[int, Sequence[Query]]) -> Mapping[int, Scores]:
        """Return the rewards of each replica's share of answers, by the function `reward.name`."""
        ...


def available(replicas: Replicas) -> Sequence[int]:
    """Return the numbers of the replicas that can generate. NoReplicas: there is none."""
    numbers = replicas.numbers
    if not numbers:
        raise NoReplicas("no rank can generate: all have been lost")
    return numbers


@dataclass(frozen=True)
class ReplicaScorer:
    """Implements `Scorer` by the function `reward.name` on the ranks of replicas, so that it runs on all their nodes.

    What a replica that is lost had to score, the others score.
    """

    replicas: Replicas

    def score(self, queries: Sequence[Query]) -> Scores:
        """Return the rewards of answers, in order. NoReplicas: all replicas have been lost."""

        def ask(numbers: Mapping[int, list[int]]) -> Mapping[int, Scores]:
            return self.replicas.score({replica: [queries[i].text for i in of] for replica, of in numbers.items()})

        return together(ask_all(partial(available, self.replicas), by_prompt(queries), ask))


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
        self._scorer = FunctionScorer(reward.name, reward.workers, reward.timeout_seconds, reward.default)
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

    def answer(self, shares: Mapping[int, Sequence[Work]], version: int, sampling: Sampling) -> Mapping[int, Answers]:
        if self._partial is not None:
            self._partial.end_requests()
        work = shares[self._engine.replica]
        examples, seeds = [example for example, _ in work], [seed for _, seed in work]
        if self._agents is not None:
            sessions = self._agents.run(examples, seeds, version, sampling)
            return self._of_all_replicas(self._answers_of_agents(sessions))
        trajectories = self._multi_turn.run(examples, seeds, version, sampling)
        return self._of_all_replicas(self._answers(trajectories))

    def advance(
        self,
        prompts: Mapping[int, Sequence[Prompt]],
        wanted: Mapping[int, int] | None,
        version: int,
        sampling: Sampling,
        stop: Callable[[], bool] | None = None,
    ) -> Mapping[int, PartialAnswers]:
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
        return self._of_all_replicas(PartialAnswers(self._answers(taken), self._partial.places, dropped))

    def score(self, shares: Mapping[int, Sequence[Query]]) -> Mapping[int, Scores]:
        return self._of_all_replicas(self._scorer.score(shares[self._engine.replica] if self._engine.leads else ()))

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

    def _answers(self, trajectories: Sequence[Trajectory]) -> Answers:
        """Return answers as samples; on the ranks that do not report for their replica none."""
        trajectories = trajectories if self._engine.leads else []
        samples = [
            one.sample(
                one.example, one.example.prompt_ids, decode_part(self._tokenizer, one.tokens, one.example.prompt_ids)
            )
            for one in trajectories
        ]
        return self._with_failures(samples, OF_ENVIRONMENT, trajectories)

    def _answers_of_agents(self, sessions: Sequence[Session]) -> Answers:
        samples = [
            sample for session in sessions for sample in samples_of(session, self._tokenizer, self._default_reward)
        ]
        return self._with_failures(samples, OF_AGENT, sessions)

    def _with_failures(self, samples: list[Sample], who: str, talks: Sequence[Trajectory | Session]) -> Answers:
        """Return samples with the failures of the conversations that they are of."""
        failed = [(f"{who}{talk.failure}", talk.message) for talk in talks if talk.failure]
        samples = samples if self._holder is None else held_samples(samples, self._holder)
        return Answers(samples, dict(Counter(kind for kind, _ in failed)), dict(reversed(failed)))

    def _of_all_replicas(self, value: T) -> dict[int, T]:
        """Return the values of all replicas, by number; each replica's is that of its leading rank."""
        return self._exchange.gather(self._engine.replica, value if self._engine.leads else None)
