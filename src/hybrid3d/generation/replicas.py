"""Replicas of the model that generates: what a step asks of them, and those whose ranks call it together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch.distributed as dist

from hybrid3d.config import Async, Recipe
from hybrid3d.distributed import all_reduce_max
from hybrid3d.generation.agents.answers import AgentAnswers
from hybrid3d.generation.engine import Engine, Sampling
from hybrid3d.generation.exchange import AnswerExchange
from hybrid3d.generation.samples import held_samples
from hybrid3d.generation.scheduler import Answers, Continuation, Prompt, Prompts, Scheduler
from hybrid3d.generation.turns import Conversations, Turns
from hybrid3d.scoring.scorer import FunctionScorer, Query, Scores, ask_all, by_prompt, together


class NoReplicas(RuntimeError):
    """There is no replica that can generate: all have been lost."""

    raised_on_all_ranks = True  # the first rank that trains sends it to the others


class Replicas(Protocol):
    """Replicas that answer prompts, by number. Which there are may change between two calls.

    A replica that is lost during a call is not in the call's result, and no other replica ever has its number.
    """

    @property
    def numbers(self) -> Sequence[int]:
        """The replicas that can generate, ascending."""
        ...

    def advance(
        self,
        prompts: Mapping[int, Sequence[Prompt]],
        wanted: Mapping[int, int] | None,
        version: int,
        sampling: Sampling,
        stop: Callable[[], bool] | None = None,
        apart: bool = False,
    ) -> Mapping[int, Answers]:
        """Go on with the prompts of each replica, and with these more, with weights of this version or a later one.

        Args:
            wanted: how many prompts each replica is to complete and give back; None completes all that it has, or until
                `stop` returns True, and gives none back.
            apart: complete these prompts alone and give all of them back; others stay as they are. Only with
                `async.partial` there are others.

        Raises:
            StaleWeights: the engine's weights are older, or a sync of them was interrupted.
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
        self._engine = engine
        self._exchange = AnswerExchange(group, recipe.machine.gpus_per_node, receivers)
        self._holder = group.rank() if receivers is None else None  # of the choices of experts
        reward = recipe.reward
        self._scorer = FunctionScorer(reward.name, reward.workers, reward.timeout_seconds, reward.default)
        assert recipe.rollout is not None, "checked when the recipe was read"
        self._turns = Turns(recipe, engine, tokenizer, group)
        has_agents, has_environment = recipe.rollout.agents is not None, self._turns.have_environment
        self._agents = AgentAnswers(recipe, engine, tokenizer) if has_agents and engine.leads else None

        def all_done(done: bool) -> bool:
            return not all_reduce_max([int(not done)], group)[0]

        def scheduler(settings: Async) -> Scheduler[Any]:
            continuation: Continuation[Any] = self._agents or Conversations(self._turns, waves=not settings.partial)
            lead = Prompts(continuation, settings) if engine.leads else None
            listens = has_agents or (has_environment and bool(settings.partial))
            agree = all_done if engine.steps_together and not settings.partial else bool
            return Scheduler(engine, lead, settings, listens, agree)

        self._apart = scheduler(Async())
        self._partial = scheduler(recipe.async_) if recipe.async_.partial else self._apart

    @property
    def numbers(self) -> Sequence[int]:
        return range(self._engine.replicas)

    def advance(
        self,
        prompts: Mapping[int, Sequence[Prompt]],
        wanted: Mapping[int, int] | None,
        version: int,
        sampling: Sampling,
        stop: Callable[[], bool] | None = None,
        apart: bool = False,
    ) -> Mapping[int, Answers]:
        replica, scheduler = self._engine.replica, self._apart if apart else self._partial
        if apart:
            self._partial.release(version)
        own, count, gives = prompts.get(replica, ()), (wanted or {}).get(replica), apart or bool(wanted)
        answers = scheduler.advance(own, count, version, sampling, stop, gives)
        if answers and self._holder is not None:
            answers = replace(answers, samples=held_samples(answers.samples, self._holder))
        return self._exchange.gather(replica, answers)

    def score(self, shares: Mapping[int, Sequence[Query]]) -> Mapping[int, Scores]:
        own = self._scorer.score(shares[self._engine.replica]) if self._engine.leads else None
        return self._exchange.gather(self._engine.replica, own)

    def reset(self) -> None:
        """Drop the prompts that are being answered, as those who asked are lost."""
        self._partial.reset()

    def close(self) -> None:
        """End the processes that compute rewards and replies, and what agents connect to."""
        self._scorer.close()
        self._turns.close()
        if self._agents is not None:
            self._agents.close()
