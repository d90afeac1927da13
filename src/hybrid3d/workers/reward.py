"""A rank that only computes rewards, with the reward function or a shard of the reward model; and a run's scorers.

`RewardWorkers` is what the first rank that trains sees of such ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from hybrid3d import distributed, launch_environment
from hybrid3d.config import Recipe
from hybrid3d.generation.replicas import Replicas, ReplicaScorer
from hybrid3d.inputs.models import read_config, read_tokenizer
from hybrid3d.process import new_engine_name, set_shared_memory_prefix
from hybrid3d.run.logger import RunLogger
from hybrid3d.run.metrics import PhaseTimer
from hybrid3d.scoring.pool_client import GRACE_SECONDS
from hybrid3d.scoring.scorer import FunctionScorer, Given, Query, Scorer, Scorers, Scores, ask_all, by_prompt, together
from hybrid3d.workers.channel import Connection
from hybrid3d.workers.messages import Call, Reply, Score, WithTexts
from hybrid3d.workers.role_client import RoleClient, WorkerGroup

if TYPE_CHECKING:
    from hybrid3d.train.trained_model import ModelScorer


class RewardRank:
    """Implements `RoleRank` by one rank of a group that computes rewards, which is ready when it has computed some.

    Without a reward model a group has one rank, which imports no engine.
    """

    def __init__(self, recipe: Recipe, store: Store, ranks: range, start: int):
        reward = recipe.reward
        self.start, self.ready = start, False
        self._leads = launch_environment.rank() == ranks.start
        set_shared_memory_prefix(new_engine_name(launch_environment.run_id(), ranks.start, start))
        self._function = FunctionScorer(reward.name, reward.workers, reward.timeout_seconds, reward.default)
        self._scorers: dict[str, Scorer] = {"function": self._function}
        if reward.model is not None:
            group = distributed.start_among(ranks, f"reward/{ranks.start}/{start}", store)
            self._scorers["model"] = load_model_scorer(recipe, reward.model, read_tokenizer(recipe).pad_token_id, group)

    def begin(self, connection: Connection) -> None:
        """Nothing is kept from one call to the next."""

    def interrupt(self) -> None:
        """No rank that trains takes part in what this one does."""

    def call(self, call: Call) -> Reply:
        """Return the rewards of answers; on ranks that do not lead their group, none."""
        assert isinstance(call, Score), type(call).__name__
        asks = self._leads or call.scorer == "model"  # all ranks have shards of it
        timer = PhaseTimer()
        with timer("reward"):
            scores = self._scorers[call.scorer].score(call.shares[0].whole() if asks else ())
        self.ready = True
        return Reply(scores={0: scores} if self._leads else {}, spans=timer.spans, peak_memory=timer.peaks["reward"])

    def close(self) -> None:
        """End the processes that compute rewards, and destroy the group."""
        self._function.close()
        if "model" in self._scorers:
            dist.destroy_process_group()


def load_model_scorer(recipe: Recipe, path: str, pad_id: int, group: dist.ProcessGroup) -> ModelScorer:
    """Load the reward model at `path` over the ranks of a group, all of which call this together."""
    from hybrid3d.train.megatron import runtime
    from hybrid3d.train.megatron.value_model import ValueModel
    from hybrid3d.train.trained_model import ModelScorer

    recipe = replace(recipe, train=recipe.reward_layout)
    runtime.initialize(recipe.train, recipe.run.seed)
    return ModelScorer(ValueModel(read_config(path), recipe, group.rank(), path=path), recipe, pad_id, group)


CALL_SECONDS = 420.0  # of a call at most: a group that comes back shares the next one, and a lost one had little to do


class RewardWorkers(RoleClient):
    """All groups of ranks that compute rewards. What a group that is lost had to score, the others score."""

    activity = "reward"

    def __init__(self, recipe: Recipe, store: Store, record: RunLogger):
        super().__init__(recipe, store, record, "reward")
        reward = recipe.reward
        # How many answers a rank can score in a call, however long each of them takes
        self._most = max(1, int(CALL_SECONDS // (reward.timeout_seconds + GRACE_SECONDS))) * reward.workers
        self._asked: list[WorkerGroup] = []  # in the last call

    def score(self, queries: Sequence[Query], scorer: str) -> Scores:
        """Return the rewards of answers by `model` or `function`, after waiting for ranks that can compute them."""
        prompts, sent = by_prompt(queries), [query if scorer == "model" else query.text for query in queries]
        most = max(1, self._most // max(map(len, prompts), default=1)) if scorer == "function" else len(prompts)

        def ask(numbers: Mapping[WorkerGroup, list[int]]) -> Mapping[WorkerGroup, Scores]:
            calls = {
                group: Score({0: WithTexts.of([sent[i] for i in of_group])}, scorer)
                for group, of_group in numbers.items()
            }
            return {group: first.scores[0] for group, (first, *_) in self._receive(self._send(calls)).items()}

        return together(ask_all(self._wait_for_groups, prompts, ask, most))

    def _wait_for_groups(self) -> list[WorkerGroup]:
        """Return the groups that are ready, after waiting for one; the first time, for all of them."""
        count, event = (1, "no_reward_worker") if self._asked else (self._active, "")
        ready = self._wait_for(lambda: count, event, "no rank can compute rewards: waiting for one to come back")
        if not self._asked:
            self._record_sandbox()
        for group in ready if self._asked else ():
            if group not in self._asked:
                why = "; ".join(group.failures)
                message = f"{group} computes rewards again after it was lost: {why}"
                self._record.event("reward_worker_joined", message, ranks=group.ranks, why=why)
        self._asked = ready
        return ready

    def _record_lost(self, group: WorkerGroup, moment: float, ready: int) -> None:
        message = (
            f"{group} lost: {ready} of {self._active} groups can compute rewards, and its ranks are started again, "
            f"at most roles.reward.max_restarts times{group.lost_while}"
        )
        self._record.event("reward_worker_lost", message, ranks=group.ranks, time=moment, phase=group.lost_in)


@dataclass(frozen=True)
class WorkerScorer:
    """Implements `Scorer` by ranks that only compute rewards: with their `model`, or with the `function`."""

    workers: RewardWorkers
    name: str

    def score(self, queries: Sequence[Query]) -> Scores:
        """Return the rewards of answers, in order, after waiting for ranks that can compute them."""
        return self.workers.score(queries, self.name)


@dataclass(frozen=True)
class OfFirstRank:
    """Implements `Scorer` on all ranks of a group by a scorer that its first rank has."""

    scorer: Scorer | None
    group: dist.ProcessGroup

    def score(self, queries: Sequence[Query]) -> Scores:
        """Return the rewards of answers, in order."""
        own = None if self.scorer is None else self.scorer.score(queries)
        scores: Scores = distributed.broadcast_object(own, self.group)
        return scores


def make_scorers(
    recipe: Recipe, replicas: Replicas, workers: RewardWorkers | None, group: dist.ProcessGroup | None
) -> Scorers:
    """Return the scorers that a recipe asks for: of the answers that are trained on, and of those to held-out problems.

    All ranks of the group ask; without one the first rank asks alone, which has the workers, if there are any.
    """
    if recipe.roles.reward.ranks is None:
        by_function: Scorer = ReplicaScorer(replicas)
        return Scorers(None if recipe.reward.model is not None else Given(by_function), Given(by_function))

    def by(name: str) -> Scorer:
        own = None if workers is None else WorkerScorer(workers, name)
        if group is not None:
            return Given(OfFirstRank(own, group))
        assert own is not None, "the first rank knows the ranks that compute rewards"
        return Given(own)

    return Scorers(by("function" if recipe.reward.model is None else "model"), by("function"))
