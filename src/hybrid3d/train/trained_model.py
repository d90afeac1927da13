"""What training asks of a model in the train layout; `train/megatron/` implements it with Megatron-Core.

A reward model in this layout scores answers by `ModelScorer`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist

from hybrid3d.config import Recipe, Train, sequences_multiple
from hybrid3d.distributed import gather_objects
from hybrid3d.families import Config
from hybrid3d.reshard.ends import WeightSource
from hybrid3d.rl.batch import Batch
from hybrid3d.rl.objective import TokenLoss
from hybrid3d.scoring.scorer import Query, Scores, scores_of
from hybrid3d.train.dp_split import shares_of

BucketHook = Callable[[int, bool], None]
"""Called with a bucket's number, and whether it is the last, as soon as its parameters are updated and gathered.

Ranks of one stage have the same buckets; other stages may have more or fewer.
"""


@dataclass(frozen=True)
class StepReport:
    """The result of one update.

    Attributes:
        sums: sums over this rank's tokens; empty on ranks without the output layer.
        grad_norm: the norm of the gradient before clipping.
        lr: the learning rate of the update.
        updated: False if the gradient's norm was not accepted; then nothing has changed.
    """

    sums: dict[str, float]
    grad_norm: float
    lr: float
    updated: bool


class TrainedModel(Protocol):
    """This rank's shards of a model. Every rank calls every method together.

    Attributes:
        config: of the checkpoint.
        has_output: whether this rank has the output layer, and so what is computed of tokens.
        is_reporting_rank: whether this rank's sums count: one rank with the output layer of each replica.
        data_parallel_rank: the number of this rank's replica.
    """

    config: Config
    has_output: bool
    is_reporting_rank: bool
    data_parallel_rank: int

    def train_step(
        self,
        batch: Batch,
        token_loss: TokenLoss | None,
        recipe: Recipe,
        bucket_hook: BucketHook | None = None,
        accepts_grad_norm: Callable[[float], bool] = math.isfinite,
    ) -> StepReport:
        """Update the model once, on the mean loss over every response token of every replica's batch.

        Args:
            token_loss: None on ranks without the output layer.
            recipe: the settings of this step, such as the micro batch size and the learning rate.
            bucket_hook: called with each optimizer bucket as soon as its parameters have their new values.
            accepts_grad_norm: called with the gradient's norm before anything is updated; False skips the update.
        """

    def end_step(self) -> None:
        """Advance the learning rate schedule, which counts steps of the run, not updates."""

    def onload(self, *kinds: str) -> None:
        """Undo `offload`, only for these kinds of memory if any are given."""

    def offload(self, train: Train) -> int:
        """Free the memory that `train.offload_*` selects until it is used again; return its size in bytes."""

    def own_source(self) -> WeightSource:
        """Return the source of all of the model's own weights."""

    def trained_source(self) -> WeightSource:
        """Return the source of the weights that updates change: the adapters of a model that has some."""

    def spread(self, values: torch.Tensor) -> None:
        """Give the reporting rank's values, in place, to all ranks of its replica that have the output layer."""


class ReplayedRouters(Protocol):
    """The routers of a model with experts, which choose what was chosen before.

    Attributes:
        shape: layers with experts, and experts of a token.
        recorded: the choices of the last pass if it was recorded, [B, T, layers, experts of a token].
    """

    shape: tuple[int, int]
    recorded: torch.Tensor | None

    def equal_choices(self) -> int:
        """Return how many of the given choices this rank's routers would have made themselves."""


class PolicyModel(TrainedModel, Protocol):
    """A language model whose log-probabilities are those of the distribution that the rollout engine samples.

    Attributes:
        has_experts: whether tokens are routed to experts, so that rounding may route one to another expert.
        router_replay: makes routers choose the experts that a batch has; None where they always choose themselves.
    """

    has_experts: bool

    @property
    def router_replay(self) -> ReplayedRouters | None: ...

    def logprobs(self, batch: Batch, recipe: Recipe) -> torch.Tensor | None:
        """Return the log-probability of every token given those before it, [B, T]; None without the output layer."""

    def logprobs_and_entropies(self, batch: Batch, recipe: Recipe) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return also the entropy, in nats, of the distribution that each token was sampled from, both [B, T]."""

    def as_base(self) -> AbstractContextManager[None]:
        """Compute what the model without its adapters computes."""

    def merged(self) -> AbstractContextManager[None]:
        """Hold in its own weights the sums with its adapters, if it has some."""

    def source(self) -> WeightSource:
        """Return the source of the weights that the rollout engine generates with."""


class ScoringModel(TrainedModel, Protocol):
    """A model with one number per token: a critic, or a reward model."""

    def values(self, batch: Batch, recipe: Recipe) -> torch.Tensor | None:
        """Return the value before each token is sampled, [B, T] float32; None without the output layer.

        The value at a token is read at the position before it, as its log-probability is; at position 0 it is 0.
        """

    def scores(self, batch: Batch, recipe: Recipe) -> torch.Tensor | None:
        """Return the score of each sequence, at its last token, [B] float32; None without the output layer."""


TrainedModels = Mapping[str, TrainedModel]
"""The models of a run by name; in a checkpoint all keys of a model begin with its name."""


@dataclass(frozen=True)
class ModelScorer:
    """Implements `Scorer` by a reward model in the layout of the recipe's `train`; `group` has its shards."""

    model: ScoringModel
    recipe: Recipe
    pad_id: int
    group: dist.ProcessGroup

    def score(self, queries: Sequence[Query]) -> Scores:
        """Return the rewards of answers, in order; what a model says that can be no reward has failed."""
        if not queries:
            return Scores([])
        multiple = sequences_multiple(self.recipe) // self.recipe.algorithm.minibatches
        rows = [(np.concatenate([query.prompt_ids, query.tokens]), len(query.prompt_ids)) for query in queries]
        rows += [(rows[-1][0][: rows[-1][1] + 1], rows[-1][1])] * (-len(rows) % multiple)  # whole micro batches
        shares = shares_of(self.recipe, [len(sequence) for sequence, _ in rows])
        local = [rows[row] for row in shares[self.model.data_parallel_rank]]
        sequences, prompts = [sequence for sequence, _ in local], [prompt for _, prompt in local]
        found = self.model.scores(Batch.from_sequences(sequences, prompts, pad_id=self.pad_id), self.recipe)
        own = None
        if found is not None and self.model.is_reporting_rank:
            own = self.model.data_parallel_rank, found.tolist()
        scores: dict[int, float] = {}
        for place, values in filter(None, gather_objects(own, self.group)):
            scores |= zip(shares[place], values, strict=True)
        said = [scores[number] for number in range(len(queries))]
        return scores_of(queries, said, self.recipe.reward.default)
