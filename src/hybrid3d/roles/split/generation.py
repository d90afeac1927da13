"""A rank that generates, where other ranks train."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch.distributed as dist

from hybrid3d import distributed
from hybrid3d.config import Recipe
from hybrid3d.distributed import RoleGroups, broadcast_object
from hybrid3d.generation.rollouts import FailedRewards, PartialRollouts, make_rollouts
from hybrid3d.generation.samples import EvalResult, RolloutBatch, Sample
from hybrid3d.inputs.models import read_config, read_data, read_tokenizer
from hybrid3d.roles.split.exchange import is_updated, meet, share, wait_for_all
from hybrid3d.roles.weight_sync import SyncReport, WeightSync, is_verified
from hybrid3d.rollout.engine import RolloutEngine
from hybrid3d.run.metrics import StepMetrics, Stopwatch


@dataclass(frozen=True)
class ForeignExperience:
    """The experience that other ranks have made; this rank knows its samples."""

    samples: Sequence[Sample]
    metrics: StepMetrics = field(default_factory=StepMetrics)


class GenerationRank:
    """Implements `Roles` on a rank that generates.

    While others train, it waits, or generates samples of the next steps as far ahead as `async.max_staleness` allows.

    Attributes:
        train, held_out: the prompts.
    """

    models = None

    def __init__(self, recipe: Recipe, groups: RoleGroups, slots: Sequence[int]):
        self._groups, self._first = groups, recipe.role_ranks["generation"].start
        config, tokenizer = read_config(recipe.model.path), read_tokenizer(recipe)
        self._engine = RolloutEngine(recipe, groups.own.rank(), distributed.run_id(), slots)
        self._sync = WeightSync(recipe, groups.everyone, engine=self._engine, transport_group=groups.weights)
        self.train, self.held_out = read_data(recipe, config, tokenizer)
        self._rollouts = make_rollouts(recipe, self._engine, tokenizer, self.train, self.held_out, groups.own)
        self.activities: Mapping[str, str] = {"train": "generate" if recipe.async_.max_staleness else "wait"}
        self._ahead: deque[RolloutBatch | Exception] = deque()  # of the next steps
        self._next_batch = 0  # number of the first batch of prompts that is not generated yet
        self._busy = Stopwatch()

    def sync(self, version: int, recipe: Recipe) -> SyncReport:
        """Sync to this version, or finish the overlapped sync to it."""
        if self._sync.in_progress == version:
            return self._sync.finish()
        return self._sync.run(version, is_verified(recipe.sync.verify, version))

    def evaluate(self, version: int, recipe: Recipe) -> EvalResult:
        return share(lambda: self._rollouts.evaluate(version), self._groups.everyone, self._first)

    def generate_batch(self, version: int, batch: int, recipe: Recipe) -> RolloutBatch:
        if not self._ahead:
            self._next_batch = batch
        with self._busy:
            return share(partial(self._next_samples, version, recipe), self._groups.everyone, self._first)

    def _next_samples(self, version: int, recipe: Recipe) -> RolloutBatch:
        """Return the samples of a step, or raise the error of them, which may be from while others trained."""
        outcome = self._ahead.popleft() if self._ahead else self._generate(version, recipe)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def _generate(self, version: int, recipe: Recipe) -> RolloutBatch:
        """Generate the samples of the first step that has none yet."""
        generated = self._rollouts.generate_batch(version, self._next_batch, recipe)
        self._next_batch += generated.batches
        return generated

    def make_experience(self, samples: Sequence[Sample], step: int, recipe: Recipe) -> ForeignExperience:
        return ForeignExperience(samples)

    def update(self, experience: Any, step: int, recipe: Recipe) -> StepMetrics:
        """Generate ahead while the others update the models, or begin the sync with them during their last update."""
        with self._busy:
            self._generate_ahead(step, recipe)
        if recipe.overlaps_sync:
            meet(self._groups.everyone)  # the last update of the others has begun
            self._sync.begin(step + 1, is_verified(recipe.sync.verify, step + 1))
            self._sync.bucket_ready(0, last=True)
        metrics = StepMetrics(maxima={"time/generation_busy": self._busy.lap()})
        if recipe.async_.max_staleness and recipe.async_.partial is None:
            metrics.maxima["rollout/batches_ahead"] = len(self._ahead)
        return metrics

    def _generate_ahead(self, step: int, recipe: Recipe) -> None:
        if isinstance(self._rollouts, PartialRollouts):
            self._rollouts.generate_ahead(step, recipe, lambda: is_updated(self._groups.store, step))
            return
        most = min(recipe.async_.max_staleness, recipe.run.steps - step)
        while len(self._ahead) < most and not (self._ahead and self._is_updated(step)):
            try:
                self._ahead.append(self._generate(step, recipe))
            except FailedRewards as error:  # the other ranks learn of it when they ask for these samples
                self._ahead.append(error)
                break

    @property
    def progress(self) -> dict[str, Any]:
        return {}

    def restore(self, progress: Mapping[str, Any], recipe: Recipe) -> None:
        self._rollouts.restore(progress)

    def _is_updated(self, step: int) -> bool:
        """Return whether the update of this step is done; the ranks that generate call this together, and agree."""
        own = self._groups.own
        return broadcast_object(is_updated(self._groups.store, step) if own.rank() == 0 else False, own)

    def close(self, recipe: Recipe) -> None:
        dist.barrier(self._groups.everyone)
        self._rollouts.close()
        everyone = self._groups.everyone
        rank, ranks = everyone.rank(), everyone.size()
        self._engine.close()  # destroys the groups
        wait_for_all(self._groups.store, rank, ranks)
