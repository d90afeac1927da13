"""Runs both engines in each process, with one process per GPU, which is the default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch.distributed as dist

from hybrid3d import distributed
from hybrid3d.config import Recipe
from hybrid3d.config.interval import is_due
from hybrid3d.distributed import weights_group
from hybrid3d.generation.evaluation import EvalResult
from hybrid3d.generation.replicas import EngineReplicas
from hybrid3d.generation.rollouts import make_rollouts
from hybrid3d.generation.samples import RolloutBatch
from hybrid3d.inputs.models import read_config, read_data, read_tokenizer
from hybrid3d.process import new_engine_name
from hybrid3d.reshard.move.device import device
from hybrid3d.rollout.engine import RolloutEngine
from hybrid3d.run.health import Guard
from hybrid3d.run.memory import Peaks, meter
from hybrid3d.run.metrics import StepMetrics
from hybrid3d.run.progress import Progress
from hybrid3d.run.timeline import Span
from hybrid3d.sync import SyncReport, policy_sync
from hybrid3d.train.trained_model import BucketHook, TrainEngine
from hybrid3d.trainer.learner import Learner
from hybrid3d.trainer.models import Models
from hybrid3d.trainer.scorers import make_scorers
from hybrid3d.trainer.step_experience import Experience
from hybrid3d.watch.work_meter import record as work_record
from hybrid3d.workers.roles import WorkerServer


class Colocated:
    """Implements `Roles` with both engines on every rank, and decides when each engine has the GPU memory.

    - During `sync` the trainer has its parameters, and vLLM its weights but no KV cache.
    - When `sync` returns, the trainer is offloaded as `train.offload_*` says, and vLLM can generate.
    - From `make_experience` on vLLM sleeps, until the last update wakes it for the sync that overlaps it.

    Attributes:
        models: the models in the train layout; None if the run does not train.
        train, held_out: the prompts, the latter by the names of their files.
    """

    activities: Mapping[str, str] = {}

    def __init__(
        self,
        recipe: Recipe,
        training: TrainEngine,
        group: dist.ProcessGroup,
        slots: Sequence[int],
        guard: Guard | None = None,
        weights_of: Path | None = None,
        others: WorkerServer | None = None,
        start: int = 0,
    ):
        """
        Args:
            training: builds the models in the train layout.
            slots: the slot of each rank in the rollout layout.
            guard: the guard of a run that trains; None if it does not train.
            weights_of: a checkpoint whose weights the policy loads instead of those of `model.path`.
            others: on the first rank, the roles of ranks that do not train, if there are any.
            start: number of this start of these ranks.

        Raises:
            BrokenCheckpoint: `weights_of` is damaged; raised on every rank, before vLLM starts.
        """
        self._group, self._others, rank = group, others, group.rank()
        self.config = read_config(recipe.model.path)
        self.tokenizer = read_tokenizer(recipe)
        self._policy = training.policy(self.config, recipe, rank, trainable=guard is not None)
        if weights_of is not None:
            training.load_weights({"policy": self._policy}, weights_of, group)
        self._policy.offload(recipe.train)  # vLLM sizes its memory by what is free when it starts
        weights = weights_group(group, device())  # not later, for the same reason
        dist.barrier(group)  # ranks read the model at different speeds, and vLLM's start has collectives on GPUs
        self._engine = RolloutEngine(recipe, rank, new_engine_name(distributed.run_id(), 0, start), slots)
        meter.asleep = self._engine.asleep_bytes
        work_record.trains(recipe, rank)
        work_record.generates(self._engine.rank_in_replica, lambda: self._engine.generated)
        self._overlaps = guard is not None and recipe.overlaps_sync
        self._sync = policy_sync(
            recipe, group, self._policy, self._engine, overlaps=self._overlaps, transport_group=weights
        )
        self.train, self.held_out = read_data(recipe, self.config, self.tokenizer)
        self._replicas = EngineReplicas(recipe, self._engine, self.tokenizer, group)
        workers = None if others is None else others.reward_workers
        scorers = make_scorers(recipe, self._replicas, workers, group)
        self._rollouts = make_rollouts(recipe, self._replicas, scorers, self.train, self.held_out)
        self.models: Models | None = None
        if guard is not None:
            self._engine.sleep()
            self.models = Models.of(training, recipe, self._policy, group)
            self._learner = Learner(recipe, self.models, guard, self.tokenizer.pad_token_id, group)

    def sync(self, version: int, recipe: Recipe) -> SyncReport:
        """Sync to this version, or finish the overlapped sync to it, and prepare vLLM to generate."""
        if self._sync.in_progress == version:
            report = self._sync.finish()
        else:
            self._policy.onload("parameters")
            self._wake_weights()
            report = self._sync.run(version, is_due(recipe.sync.verify, version))
        (self.models or self._policy).offload(recipe.train)
        meter.stop()  # the KV cache is memory of the phases that follow, which generate
        self._engine.wake("kv_cache")
        return report

    def evaluate(self, version: int, recipe: Recipe) -> EvalResult:
        return self._rollouts.evaluate(version, recipe)

    def generate_batch(self, version: int, batch: int, recipe: Recipe) -> RolloutBatch:
        return self._rollouts.generate_batch(version, batch, recipe)

    def make_experience(self, batch: RolloutBatch, step: int, recipe: Recipe) -> Experience:
        self._engine.sleep()
        meter.start()  # what vLLM has just freed was memory of the phase before
        return self._learner.make_experience(batch, step, recipe)

    def update(self, experience: Experience, step: int, recipe: Recipe) -> StepMetrics:
        metrics = self._learner.update(experience, step, recipe, self._overlap_hook(step + 1, recipe))
        if self._others is not None:
            metrics.maxima |= self._others.lap_busy_seconds()
        return metrics

    @property
    def progress(self) -> Progress:
        return self._learner.progress

    def restore(self, progress: Progress, recipe: Recipe) -> None:
        self._learner.restore(progress, recipe)
        self._rollouts.restore(progress.unfinished)

    def worker_spans(self, begin: float, end: float) -> Mapping[int, Sequence[Span]]:
        return {} if self._others is None else self._others.spans(begin, end)

    def pop_worker_peak_memory(self) -> Mapping[int, Peaks]:
        return {} if self._others is None else self._others.lap_peaks()

    def close(self, recipe: Recipe) -> None:
        dist.barrier(self._group)
        if self._others is not None:
            self._others.close()
        self._replicas.close()
        (self.models or self._policy).offload(recipe.train)  # vLLM wakes to shut down
        self._engine.close()

    def _overlap_hook(self, version: int, recipe: Recipe) -> BucketHook | None:
        """Return a hook that syncs each optimizer bucket of the last update; None if syncs do not overlap it."""
        if not self._overlaps:
            return None
        verify = is_due(recipe.sync.verify, version)
        return self._sync.begin_when_ready(version, verify, prepare=self._wake_weights)

    def _wake_weights(self) -> None:
        meter.split()
        self._engine.wake("weights")
