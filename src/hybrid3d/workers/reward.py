"""A rank that only computes rewards: with the reward function, or with a shard of the reward model."""

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
from hybrid3d.workers.channel import Connection
from hybrid3d.workers.messages import Call, Reply

if TYPE_CHECKING:
    from hybrid3d.train.megatron.value_model import ValueModel


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
