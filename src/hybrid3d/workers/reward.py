"""A rank that only computes rewards: with the reward function, or with a shard of the reward model.

`RewardWorkers` is what the first rank that trains sees of such ranks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from hybrid3d import distributed
from hybrid3d.config import Recipe
from hybrid3d.distributed import gather_objects
from hybrid3d.generation.samples import Sample
from hybrid3d.inputs.models import read_config, read_tokenizer
from hybrid3d.process import new_engine_name, set_shared_memory_prefix
from hybrid3d.rl.batch import Batch
from hybrid3d.run.memory import meter
from hybrid3d.scoring.scorer import Scorer, Scores, scores_of
from hybrid3d.watch.heartbeat import enter_phase
from hybrid3d.workers.channel import Call, Connection, Reply

if TYPE_CHECKING:
    from hybrid3d.train.megatron.value_model import ValueModel
import itertools
from collections import Counter

from hybrid3d.run.logger import Record
from hybrid3d.scoring.code import sandbox
from hybrid3d.scoring.pool_client import GRACE_SECONDS
from hybrid3d.scoring.pool_worker import BATCH_SECONDS
from hybrid3d.workers.role_client import WorkerGroup, WorkerGroups


class RewardRank:
    """One rank of a group that computes rewards. Without a reward model a group has one rank, which imports no engine.

    Attributes:
        start: number of the start of the group.
        ready: whether it has computed rewards.
    """

    def __init__(self, recipe: Recipe, store: Store, ranks: range, start: int):
        """
        Args:
            ranks: those of its group.
            start: number of this start of the group.
        """
        reward = recipe.reward
        self.start, self.ready = start, False
        self._leads = distributed.rank() == ranks.start
        set_shared_memory_prefix(new_engine_name(distributed.run_id(), ranks.start, start))
        self._default = reward.default
        self._scorer = Scorer(reward.name, reward.workers, reward.timeout_seconds, reward.default)
        self._model: ScoringModel | None = None
        if reward.model is not None:
            group = distributed.start_among(ranks, f"reward/{ranks.start}/{start}", store)
            self._model = ScoringModel(recipe, reward.model, read_tokenizer(recipe).pad_token_id, group)

    def begin(self, connection: Connection) -> None:
        """Nothing is kept from one call to the next."""

    def interrupt(self) -> None:
        """No rank that trains takes part in what this one does."""

    def call(self, call: Call) -> Reply:
        """Return the `Scores` of samples; on ranks that do not lead their group, None."""
        assert call.method == "score", call.method
        enter_phase("reward")
        begin = time.time()
        meter.start()
        scores = self._score(**call.arguments)
        self.ready = True
        return Reply(scores if self._leads else None, [("reward", begin, time.time())], meter.stop())

    def _score(self, samples: Sequence[Sample], by_model: bool) -> Scores:
        if by_model:
            assert self._model is not None, "only asked for where there is one"
            found = scores_of(self._model.score(samples), self._default)
        else:
            found = self._scorer.score([(s.answer, s.reference, s.prompt) for s in samples] if self._leads else [])
        return found.naming([sample.row for sample in samples])

    def close(self) -> None:
        """End the processes that compute rewards, and destroy the group."""
        self._scorer.close()
        if self._model is not None:
            dist.destroy_process_group()


class ScoringModel:
    """The reward model, over the ranks of a group. All of them call it together."""

    def __init__(self, recipe: Recipe, path: str, pad_id: int, group: dist.ProcessGroup):
        """
        Args:
            path: the checkpoint of the model.
        """
        from hybrid3d.train.megatron import runtime
        from hybrid3d.train.megatron.value_model import ValueModel

        self._recipe = replace(recipe, train=recipe.reward_layout)
        runtime.initialize(self._recipe.train, recipe.run.seed)
        self._model: ValueModel = ValueModel(read_config(path), self._recipe, group.rank(), path=path)
        self._pad_id, self._group = pad_id, group

    def score(self, samples: Sequence[Sample]) -> list[float]:
        """Return the score of each sample, on every rank."""
        if not samples:
            return []
        train = self._recipe.train
        multiple = 1 if train.max_tokens_per_micro_batch is not None else train.micro_batch_size
        rows = [*samples, *[samples[-1]] * (-len(samples) % multiple)]  # whole micro batches
        sequences, prompts = [s.prompt_ids + s.tokens for s in rows], [len(s.prompt_ids) for s in rows]
        batch = Batch.from_sequences(sequences, prompts, loss_mask=[s.loss_mask for s in rows], pad_id=self._pad_id)
        scores = self._model.scores(batch, self._recipe)
        reported = None if scores is None or not self._model.is_reporting_rank else scores.tolist()
        found = gather_objects(reported, self._group)
        (values,) = filter(None, found)
        return list(values[: len(samples)])


class RewardWorkers(WorkerGroups):
    """All groups of ranks that compute rewards. What a group that is lost had to score, the others score."""

    activity = "reward"

    def __init__(self, recipe: Recipe, store: Store, record: Record):
        super().__init__(recipe, store, record, "reward")
        reward, self._per_prompt = recipe.reward, recipe.algorithm.samples_per_prompt
        self._runs_code = reward.name == "code"
        # How many samples a rank can score within the time limit of a batch, however long each of them takes
        rounds = max(1, int(BATCH_SECONDS // (reward.timeout_seconds + GRACE_SECONDS)))
        self._most = max(1, rounds * reward.workers // self._per_prompt) * self._per_prompt
        self._asked: list[WorkerGroup] = []  # in the last call

    def score(self, samples: Sequence[Sample], by_model: bool) -> Scores:
        """Return the rewards of samples, after waiting for ranks that can compute them.

        Args:
            by_model: use the reward model; otherwise the function.
        """
        rewards: dict[int, float] = {}
        failures: Counter[str] = Counter()
        examples: dict[str, str] = {}
        while remaining := [i for i in range(len(samples)) if i not in rewards]:
            groups = self._wait_for_groups()
            most = len(remaining) if by_model else self._most * len(groups)
            shares = dict(zip(groups, self._divide(remaining[:most], len(groups)), strict=True))
            calls = {
                group: Call("score", {"samples": [samples[i] for i in share], "by_model": by_model})
                for group, share in shares.items()
            }
            for group, (scores, *_) in self._receive(self._send(calls)).items():
                rewards |= zip(shares[group], scores.rewards, strict=True)
                failures.update(scores.failures)
                examples = scores.examples | examples
        return Scores([rewards[i] for i in range(len(samples))], dict(failures), examples)

    def _divide(self, items: Sequence[int], groups: int) -> list[Sequence[int]]:
        """Divide items between groups: the answers to a prompt stay together, as a batched reward may compare them."""
        prompts = -(-len(items) // self._per_prompt)
        bounds = [prompts * i // groups * self._per_prompt for i in range(groups + 1)]
        return [items[begin:end] for begin, end in itertools.pairwise(bounds)]

    def _wait_for_groups(self) -> list[WorkerGroup]:
        """Return the groups that are ready, after waiting for one; the first time, for all of them."""
        count, event = (1, "no_reward_worker") if self._asked else (self._active, "")
        ready = self._wait_for(count, event, "no rank can compute rewards: waiting for one to come back")
        if not self._asked and self._runs_code:
            self._record.event("sandbox", sandbox.warning(self.confined_by or ""), confined_by=self.confined_by or "")
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
