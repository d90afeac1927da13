"""Generates on other ranks than those that train: also the samples of the next steps, while the models are updated."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from hybrid3d.config import Recipe
from hybrid3d.config.schema import is_due
from hybrid3d.distributed import all_reduce_min, broadcast_object
from hybrid3d.generation.evaluation import EvalResult
from hybrid3d.generation.replicas import NoReplicas
from hybrid3d.generation.rollouts import FailedRewards, PartialRollouts, Rollouts, make_rollouts
from hybrid3d.generation.samples import RolloutBatch, held_samples
from hybrid3d.run.metrics import StepMetrics
from hybrid3d.sync import Sync, SyncReport, policy_sync
from hybrid3d.sync.elastic import ElasticSync, Members
from hybrid3d.train.trained_model import BucketHook
from hybrid3d.trainer.checkpoints import Progress
from hybrid3d.trainer.trainer import GeneratorInputs
from hybrid3d.workers.engines import Engines
from hybrid3d.workers.loop import WorkerServer
from hybrid3d.workers.reward import make_scorers

T = TypeVar("T")

MAX_FAILED_SYNCS = 3  # in a row, without another start of an engine


class GenerationAhead:
    """The samples of the next steps, as far ahead as `async.max_staleness` allows, in a thread during each update."""

    def __init__(self, rollouts: Rollouts):
        self._rollouts = rollouts
        self._ahead: deque[RolloutBatch | FailedRewards] = deque()  # of the next steps
        self._next_batch = 0  # number of the first batch of prompts that is not generated yet
        self._updated = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None  # of the thread

    def __len__(self) -> int:
        return len(self._ahead)  # the steps whose samples are there

    def next_batch(self, version: int, batch: int, recipe: Recipe) -> RolloutBatch:
        """Return the samples of a step, generated before or now; arguments and errors as `Rollouts.generate_batch`."""
        if not self._ahead:
            self._next_batch = batch
            return self._generate(version, recipe)
        outcome = self._ahead.popleft()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def begin(self, step: int, recipe: Recipe) -> None:
        """Begin to generate, in a thread, while the models are updated in this step."""
        if recipe.async_.max_staleness:
            self._updated.clear()
            self._thread = threading.Thread(target=self._run, args=(step, recipe), name="ahead", daemon=True)
            self._thread.start()

    def end(self) -> None:
        """Wait for what is being generated, after the update; errors other than failed rewards are raised here."""
        self._updated.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            raise self._error

    def _run(self, step: int, recipe: Recipe) -> None:
        try:
            self._generate_ahead(step, recipe)
        except NoReplicas:  # the next sync waits for one
            pass
        except BaseException as error:
            self._error = error

    def _generate_ahead(self, step: int, recipe: Recipe) -> None:
        if isinstance(self._rollouts, PartialRollouts):
            self._rollouts.generate_ahead(step, recipe, self._updated.is_set)
            return
        most = min(recipe.async_.max_staleness, recipe.run.steps - step)
        while len(self._ahead) < most and not (self._ahead and self._updated.is_set()):
            try:
                self._ahead.append(self._generate(step, recipe))
            except FailedRewards as error:  # raised by the step that needs these samples
                self._ahead.append(error)
                break

    def _generate(self, version: int, recipe: Recipe) -> RolloutBatch:
        generated = self._rollouts.generate_batch(version, self._next_batch, recipe)
        self._next_batch += generated.batches
        return generated


class RemoteGenerator:
    """Implements `Generator` by ranks that only generate. The first rank asks them, and tells the others."""

    shares_devices = False
    activities: Mapping[str, str] = {"generate": "wait", "eval": "wait"}

    def __init__(
        self,
        inputs: GeneratorInputs,
        recipe: Recipe,
        group: dist.ProcessGroup,
        store: Store,
        workers: WorkerServer | None,
    ):
        """`group` has the ranks that train; `workers` are those that do not, on the first rank."""
        self._group, self._overlaps = group, inputs.overlaps
        self._engines = None if workers is None else workers.engines
        if workers is not None and self._engines is not None:
            scorers = make_scorers(recipe, self._engines, workers.reward_workers, None)
            self._rollouts = make_rollouts(recipe, self._engines, scorers, inputs.train, inputs.held_out)
            self._ahead = GenerationAhead(self._rollouts)

        def make_sync(everyone: dist.ProcessGroup, weights: dist.ProcessGroup, ranks: tuple[int, ...]) -> Sync:
            return policy_sync(
                recipe, everyone, inputs.policy, overlaps=inputs.overlaps, transport_group=weights, ranks=ranks
            )

        self._sync = ElasticSync(store, make_sync)
        self._begun: Members | None = None  # of a sync that has begun during an update

    def sync(self, version: int, recipe: Recipe) -> SyncReport:
        """Sync to this version, or finish the overlapped sync to it; again without ranks that are lost meanwhile."""
        members, self._begun = self._begun, None
        failed: Counter[tuple[int, ...]] = Counter()
        while True:
            if members is None:
                members = self._from_first(lambda engines: engines.members(recipe.active_generation_ranks))
                self._begin_sync(members, version, recipe)
            report = self._sync.finish()
            found = StepMetrics() if self._engines is None else self._engines.finish_sync()
            if all_reduce_min(int(report is not None and found is not None), self._group):
                assert report is not None
                assert found is not None
                return replace(report, of_engines=found)
            self._sync.leave()
            if self._engines is not None:
                self._engines.fail_sync(self._sync.failure)
            failed[members.engines] += 1
            if failed[members.engines] == MAX_FAILED_SYNCS:
                raise RuntimeError(f"{MAX_FAILED_SYNCS} syncs of the same ranks failed: {self._sync.failure}")
            members = None

    def begin(self) -> None:
        pass

    def _begin_sync(self, members: Members, version: int, recipe: Recipe) -> None:
        verify = is_due(recipe.sync.verify, version)
        if self._engines is not None:
            self._engines.begin_sync(members, version, verify)
        self._sync.begin(members, version, verify)

    def _from_first(self, work: Callable[[Engines], T]) -> T:
        """Return what the first rank finds, or raise the error that it has and that all ranks are to raise."""
        outcome: T | Exception | None = None
        if self._engines is not None:
            try:
                outcome = work(self._engines)
            except Exception as error:
                if not getattr(error, "raised_on_all_ranks", False):
                    raise
                outcome = error
        outcome = broadcast_object(outcome, self._group)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def _generate(self, version: int, recipe: Recipe, work: Callable[[Engines], T]) -> T:
        """Return what the first rank has generated; if all engines are lost, begin again with those that come back."""
        while True:
            try:
                return self._from_first(work)
            except NoReplicas:
                self.sync(version, recipe)

    def evaluate(self, version: int, recipe: Recipe) -> EvalResult:
        return self._generate(version, recipe, lambda _: self._rollouts.evaluate(version, recipe))

    def generate_batch(self, version: int, batch: int, recipe: Recipe) -> RolloutBatch:
        own: list[RolloutBatch] = []  # on the first rank, with the choices of experts, which only stay there

        def generate(_: Engines) -> RolloutBatch:
            made = self._ahead.next_batch(version, batch, recipe)
            own[:] = [replace(made, samples=held_samples(made.samples, rank=0))]
            return own[0]

        found = self._generate(version, recipe, generate)
        return own[0] if own else found

    def end(self) -> None:
        pass

    def begin_update(self, step: int, recipe: Recipe) -> BucketHook | None:
        hook = self._overlap_hook(step + 1, recipe)
        if self._engines is not None:
            self._ahead.begin(step, recipe)
        return hook

    def end_update(self, recipe: Recipe) -> StepMetrics:
        metrics = StepMetrics()
        if self._engines is not None:
            self._ahead.end()
            if recipe.async_.max_staleness and recipe.async_.partial is None:
                metrics.maxima["rollout/batches_ahead"] = len(self._ahead)
        if recipe.async_.max_staleness:  # the first rank waits for what is being generated, however long it takes
            all_reduce_min(1, self._group)
        return metrics

    def _overlap_hook(self, version: int, recipe: Recipe) -> BucketHook | None:
        """Return a hook that syncs each optimizer bucket of the last update; None if syncs do not overlap it."""
        active = recipe.active_generation_ranks
        if not self._overlaps or not self._from_first(lambda engines: engines.unchanged(active)):
            return None
        members = self._sync.members
        if not members:
            return None

        def hook(bucket: int, last: bool) -> None:
            if bucket == 0:
                self._begun = members
                self._begin_sync(members, version, recipe)
            self._sync.bucket_ready(bucket, last)

        return hook

    def restore(self, progress: Progress) -> None:
        if self._engines is not None:
            self._rollouts.restore(progress.unfinished)

    def leave(self) -> None:
        self._sync.leave()

    def close(self) -> None:
        dist.barrier(self._group)
