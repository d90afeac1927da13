"""The trainer: the models on the ranks that train, and the generator of their samples. Imports no vLLM."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch.distributed as dist

from hybrid3d.config import Recipe
from hybrid3d.generation.evaluation import EvalResult
from hybrid3d.generation.samples import RolloutBatch
from hybrid3d.inputs.models import read_config, read_data, read_tokenizer
from hybrid3d.rl.data import PromptData
from hybrid3d.run.health import Guard
from hybrid3d.run.metrics import StepMetrics
from hybrid3d.sync import SyncReport
from hybrid3d.train.megatron import checkpoint
from hybrid3d.train.megatron.policy import Policy
from hybrid3d.train.trained_model import BucketHook, PolicyModel
from hybrid3d.trainer.checkpoints import Progress
from hybrid3d.trainer.learner import Learner
from hybrid3d.trainer.models import Models
from hybrid3d.trainer.step_experience import Experience
from hybrid3d.watch.work_meter import record as work_record
from hybrid3d.workers.loop import WorkerServer


class Generator(Protocol):
    """Generates samples with the policy's weights. Every rank that trains makes all calls, in this order, for each `v`:

    1. `sync(v)` and `begin()`;
    2. `evaluate(v)` if an evaluation is due, and `generate_batch(v)`;
    3. `end()`;
    4. `begin_update(v)` and `end_update(v)`, except at a run's last step.

    A run that trains calls `end` once before the first of them, and `restore` if it resumes; `leave` and `close` end a
    run. Calls take the recipe with the settings of their step.

    Attributes:
        shares_devices: it has the memory of the ranks that train between `begin` and `end`.
        activities: what a rank that trains does in a phase of the loop, where that is not the phase.
    """

    @property
    def shares_devices(self) -> bool: ...

    @property
    def activities(self) -> Mapping[str, str]: ...

    def sync(self, version: int, recipe: Recipe) -> SyncReport:
        """Sync the policy's weights, which have this version, or finish a sync that the last update began."""

    def begin(self) -> None:
        """Get ready to generate; the models have left the memory."""

    def evaluate(self, version: int, recipe: Recipe) -> EvalResult:
        """Answer the held-out problems as `evaluation` of the recipe says, with weights of this version."""

    def generate_batch(self, version: int, batch: int, recipe: Recipe) -> RolloutBatch:
        """Generate and score a step's samples, with weights of this version; `batch` is the first batch of prompts."""

    def end(self) -> None:
        """Leave the memory to the models."""

    def begin_update(self, step: int, recipe: Recipe) -> BucketHook | None:
        """Take note that the models are updated now; return what syncs each optimizer bucket of the last update.

        It is None if the next sync does not overlap it.
        """

    def end_update(self, recipe: Recipe) -> StepMetrics:
        """Take note that the update is done; return this rank's share of metrics of what was generated meanwhile."""

    def restore(self, progress: Progress) -> None:
        """Continue from a checkpoint's progress."""

    def leave(self) -> None:
        """Leave what connects this rank with ranks that generate, before these end."""

    def close(self) -> None:
        """Shut down."""


@dataclass(frozen=True)
class GeneratorInputs:
    """What a generator gets of the trainer.

    Attributes:
        train, held_out: the prompts, the latter by the names of their files.
        overlaps: whether syncs begin during updates.
    """

    policy: PolicyModel
    tokenizer: Any
    train: PromptData
    held_out: Mapping[str, PromptData]
    overlaps: bool


MakeGenerator: TypeAlias = Callable[[GeneratorInputs], Generator]


class Trainer:
    """Trains a policy with the samples of a generator. Every rank that trains makes all calls together.

    Attributes:
        models: the models in the train layout; None if the run does not train.
        train, held_out: the prompts, the latter by the names of their files.
        activities: as of the generator.
        workers: on the first rank, the ranks that do not train, if there are any.
    """

    def __init__(
        self,
        recipe: Recipe,
        group: dist.ProcessGroup,
        make_generator: MakeGenerator,
        guard: Guard | None = None,
        weights_of: Path | None = None,
        workers: WorkerServer | None = None,
    ):
        """
        Args:
            guard: of a run that trains; None if it does not train.
            weights_of: a checkpoint whose weights the policy loads instead of those of `model.path`.

        Raises:
            BrokenCheckpoint: `weights_of` is damaged; raised on every rank, before an engine starts.
        """
        self._group, self.workers, self._busy_seconds = group, workers, 0.0
        config, tokenizer = read_config(recipe.model.path), read_tokenizer(recipe)
        self.train, self.held_out = read_data(recipe, config, tokenizer)
        self._policy: PolicyModel = Policy(config, recipe, group.rank(), trainable=guard is not None)
        if weights_of is not None:
            checkpoint.load_weights({"policy": self._policy}, weights_of, group)
        work_record.trains(recipe, group.rank())
        overlaps = guard is not None and recipe.overlaps_sync
        inputs = GeneratorInputs(self._policy, tokenizer, self.train, self.held_out, overlaps)
        self._generator = make_generator(inputs)
        self.activities = self._generator.activities
        self.models: Models | None = None
        if guard is not None:
            self._generator.end()
            self.models = Models.of(recipe, self._policy, group)
            self._learner = Learner(recipe, self.models, guard, tokenizer.pad_token_id, group)

    def sync(self, version: int, recipe: Recipe) -> SyncReport:
        """Sync the policy's weights, which have this version, to the generator, which then can generate."""
        report = self._generator.sync(version, recipe)
        self._make_room(recipe)
        self._generator.begin()
        return report

    def evaluate(self, version: int, recipe: Recipe) -> EvalResult:
        """Answer the held-out problems as `evaluation` of the recipe says."""
        return self._generator.evaluate(version, recipe)

    def generate_batch(self, version: int, batch: int, recipe: Recipe) -> RolloutBatch:
        """Generate and score a step's samples; arguments are those of `Generator.generate_batch`."""
        return self._generator.generate_batch(version, batch, recipe)

    def make_experience(self, batch: RolloutBatch, step: int, recipe: Recipe) -> Experience:
        """Compute the experience of a step: log-probabilities, values, advantages."""
        self._generator.end()
        start = time.perf_counter()
        experience = self._learner.make_experience(batch, step, recipe)
        self._busy_seconds = time.perf_counter() - start
        return experience

    def update(self, experience: Experience, step: int, recipe: Recipe) -> StepMetrics:
        """Update the models, whose policy then has the next version; return this rank's share of the metrics."""
        hook = self._generator.begin_update(step, recipe)
        start = time.perf_counter()
        metrics = self._learner.update(experience, step, recipe, hook)
        if not self._generator.shares_devices:
            metrics.maxima["time/training_busy"] = self._busy_seconds + time.perf_counter() - start
        metrics.update(self._generator.end_update(recipe))
        if self.workers is not None:
            metrics.maxima |= self.workers.lap_busy_seconds()
        return metrics

    @property
    def progress(self) -> Progress:
        """The state besides models that a checkpoint saves, as far as it is the learner's."""
        return self._learner.progress

    def restore(self, progress: Progress, recipe: Recipe) -> None:
        """Continue from a checkpoint's progress."""
        self._learner.restore(progress, recipe)
        self._generator.restore(progress)

    def close(self, recipe: Recipe) -> None:
        """Shut the generator down, and end the ranks that do not train."""
        dist.barrier(self._group)
        self._generator.leave()
        if self.workers is not None:
            self.workers.close()
        self._make_room(recipe)  # vLLM wakes to shut down
        self._generator.close()

    def _make_room(self, recipe: Recipe) -> None:
        if self._generator.shares_devices:
            (self.models or self._policy).offload(recipe.train)
