"""A rank that trains, where other ranks generate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hybrid3d.config import Recipe
from hybrid3d.distributed import RoleGroups
from hybrid3d.generation.samples import EvalResult, RolloutBatch, Sample
from hybrid3d.inputs.models import read_config, read_data, read_tokenizer
from hybrid3d.roles.learner import Experience, Learner
from hybrid3d.roles.models import Models
from hybrid3d.roles.split.exchange import announce_update, meet, receive, wait_for_all
from hybrid3d.roles.weight_sync import SyncReport, WeightSync, is_verified
from hybrid3d.run.health import Guard
from hybrid3d.run.metrics import StepMetrics, Stopwatch
from hybrid3d.train import checkpoint
from hybrid3d.train.policy import Policy


class TrainingRank:
    """Implements `Roles` on a rank that trains: what other ranks generate it receives.

    Attributes:
        models: the models in the train layout; None if the run does not train.
        train, held_out: the prompts.
    """

    activities: Mapping[str, str] = {"generate": "wait", "eval": "wait"}

    def __init__(self, recipe: Recipe, groups: RoleGroups, guard: Guard | None, weights_of: Path | None):
        self._groups, self._first = groups, recipe.role_ranks["generation"].start
        config, tokenizer = read_config(recipe.model.path), read_tokenizer(recipe)
        self._policy = Policy(config, recipe, groups.own.rank(), trainable=guard is not None)
        if weights_of is not None:
            checkpoint.load_weights({"policy": self._policy}, weights_of, groups.own)
        self._overlaps = guard is not None and recipe.overlaps_sync
        self._sync = WeightSync(
            recipe,
            groups.everyone,
            self._policy.weights,
            optimizer_buckets=self._policy.optimizer_buckets if self._overlaps else None,
            changes=self._policy.changes,
            transport_group=groups.weights,
        )
        self.train, self.held_out = read_data(recipe, config, tokenizer)
        self._busy = Stopwatch()
        self.models: Models | None = None
        if guard is not None:
            self.models = Models.of(recipe, self._policy, groups.own.rank())
            self._learner = Learner(recipe, self.models, guard, tokenizer.pad_token_id, groups.own)

    def sync(self, version: int, recipe: Recipe) -> SyncReport:
        """Sync to this version, or finish the overlapped sync to it."""
        if self._sync.in_progress == version:
            return self._sync.finish()
        return self._sync.run(version, is_verified(recipe.sync.verify, version))

    def evaluate(self, version: int, recipe: Recipe) -> EvalResult:
        return receive(self._groups.everyone, self._first)

    def generate_batch(self, version: int, batch: int, recipe: Recipe) -> RolloutBatch:
        return receive(self._groups.everyone, self._first)

    def make_experience(self, samples: Sequence[Sample], step: int, recipe: Recipe) -> Experience:
        with self._busy:
            return self._learner.make_experience(samples, step, recipe)

    def update(self, experience: Experience, step: int, recipe: Recipe) -> StepMetrics:
        with self._busy:
            metrics = self._update(experience, step, recipe)
        metrics.maxima["time/training_busy"] = self._busy.lap()
        if self._groups.own.rank() == 0:
            announce_update(self._groups.store, step)
        return metrics

    def _update(self, experience: Experience, step: int, recipe: Recipe) -> StepMetrics:
        """Update the models, and begin the sync of the result, as the ranks that generate do meanwhile."""
        if not self._overlaps:
            return self._learner.update(experience, step, recipe)
        verify, everyone = is_verified(recipe.sync.verify, step + 1), self._groups.everyone
        hook = self._sync.begin_when_ready(step + 1, verify, prepare=lambda: meet(everyone))
        metrics = self._learner.update(experience, step, recipe, hook)
        if self._sync.in_progress is None:  # the policy was not updated
            meet(everyone)
            self._sync.begin(step + 1, verify)
        return metrics

    @property
    def progress(self) -> dict[str, Any]:
        return self._learner.progress

    def restore(self, progress: Mapping[str, Any], recipe: Recipe) -> None:
        self._learner.restore(progress, recipe)

    def close(self, recipe: Recipe) -> None:
        everyone = self._groups.everyone
        dist.barrier(everyone)
        wait_for_all(self._groups.store, everyone.rank(), everyone.size())
