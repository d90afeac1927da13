"""Generates on the ranks that train: both engines in each process, one process per GPU. This is the default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.distributed as dist

from hybrid3d import launch_environment
from hybrid3d.config import Recipe
from hybrid3d.config.schema import is_due
from hybrid3d.distributed import weights_group
from hybrid3d.generation.evaluation import EvalResult
from hybrid3d.generation.replicas import EngineReplicas
from hybrid3d.generation.rollouts import make_rollouts
from hybrid3d.generation.samples import RolloutBatch
from hybrid3d.process import new_engine_name
from hybrid3d.reshard.move.device import device
from hybrid3d.rollout.engine import RolloutEngine
from hybrid3d.run.metrics import StepMetrics, meter
from hybrid3d.sync import SyncReport, policy_sync
from hybrid3d.train.trained_model import BucketHook
from hybrid3d.trainer.checkpoints import Progress
from hybrid3d.trainer.trainer import GeneratorInputs
from hybrid3d.watch.work_meter import record as work_record
from hybrid3d.workers.loop import WorkerServer
from hybrid3d.workers.reward import make_scorers


class LocalGenerator:
    """Implements `Generator` with vLLM on every rank that trains, and decides when it has the GPU memory.

    - During `sync` the trainer has its parameters, and vLLM its weights but no KV cache.
    - From `begin` on vLLM can generate; before it the trainer is offloaded as `train.offload_*` says.
    - From `end` on vLLM sleeps, until the last update wakes it for the sync that overlaps it.
    """

    shares_devices = True
    activities: Mapping[str, str] = {}

    def __init__(
        self,
        inputs: GeneratorInputs,
        recipe: Recipe,
        group: dist.ProcessGroup,
        slots: Sequence[int],
        workers: WorkerServer | None = None,
        start: int = 0,
    ):
        """`slots` has the slot of each rank in the rollout layout; `start` is the number of this start of the ranks."""
        self._policy, self._overlaps = inputs.policy, inputs.overlaps
        inputs.policy.offload(recipe.train)  # vLLM sizes its memory by what is free when it starts
        weights = weights_group(group, device())  # not later, for the same reason
        dist.barrier(group)  # ranks read the model at different speeds, and vLLM's start has collectives on GPUs
        self._engine = RolloutEngine(
            recipe, group.rank(), new_engine_name(launch_environment.run_id(), 0, start), slots
        )
        meter.asleep = self._engine.asleep_bytes
        work_record.generates(self._engine.rank_in_replica, lambda: self._engine.generated)
        self._sync = policy_sync(
            recipe, group, inputs.policy, self._engine, overlaps=inputs.overlaps, transport_group=weights
        )
        self._replicas = EngineReplicas(recipe, self._engine, inputs.tokenizer, group)
        reward_workers = None if workers is None else workers.reward_workers
        scorers = make_scorers(recipe, self._replicas, reward_workers, group)
        self._rollouts = make_rollouts(recipe, self._replicas, scorers, inputs.train, inputs.held_out)

    def sync(self, version: int, recipe: Recipe) -> SyncReport:
        if self._sync.in_progress == version:
            return self._sync.finish()
        self._policy.onload("parameters")
        self._wake_weights()
        return self._sync.run(version, is_due(recipe.sync.verify, version))

    def begin(self) -> None:
        meter.stop()  # the KV cache is memory of the phases that follow, which generate
        self._engine.wake("kv_cache")

    def evaluate(self, version: int, recipe: Recipe) -> EvalResult:
        return self._rollouts.evaluate(version, recipe)

    def generate_batch(self, version: int, batch: int, recipe: Recipe) -> RolloutBatch:
        return self._rollouts.generate_batch(version, batch, recipe)

    def end(self) -> None:
        self._engine.sleep()
        meter.start()  # what vLLM has just freed was memory of the phase before

    def begin_update(self, step: int, recipe: Recipe) -> BucketHook | None:
        if not self._overlaps:
            return None
        verify = is_due(recipe.sync.verify, step + 1)
        return self._sync.begin_when_ready(step + 1, verify, prepare=self._wake_weights)

    def end_update(self, recipe: Recipe) -> StepMetrics:
        return StepMetrics()

    def restore(self, progress: Progress) -> None:
        self._rollouts.restore(progress.unfinished)

    def leave(self) -> None:
        pass

    def close(self) -> None:
        self._replicas.close()
        self._engine.close()

    def _wake_weights(self) -> None:
        meter.split()
        self._engine.wake("weights")
