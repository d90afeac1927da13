"""A rank that trains, where other ranks generate: also the samples of the next steps, while the models are updated."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from hybrid3d.config import Recipe
from hybrid3d.config.interval import is_due
from hybrid3d.distributed import all_reduce_min, broadcast_object
from hybrid3d.generation.evaluation import EvalResult
from hybrid3d.generation.replicas import NoReplicas
from hybrid3d.generation.rollouts import FailedRewards, PartialRollouts, Rollouts, make_rollouts
from hybrid3d.generation.samples import RolloutBatch, held_samples
from hybrid3d.inputs.models import read_config, read_data, read_tokenizer
from hybrid3d.run.health import Guard
from hybrid3d.run.logger import RunLogger
from hybrid3d.run.memory import Peaks
from hybrid3d.run.metrics import StepMetrics, Stopwatch
from hybrid3d.run.progress import Progress
from hybrid3d.run.timeline import Span
from hybrid3d.scoring.code import sandbox
from hybrid3d.sync import Sync, SyncReport, policy_sync
from hybrid3d.sync.elastic import ElasticSync, Members
from hybrid3d.train.trained_model import BucketHook, TrainEngine
from hybrid3d.trainer.learner import Learner
from hybrid3d.trainer.models import Models
from hybrid3d.trainer.scorers import make_scorers
from hybrid3d.trainer.step_experience import Experience
from hybrid3d.watch.work_meter import record as work_record
from hybrid3d.workers.engines import Engines
from hybrid3d.workers.roles import WorkerServer

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
        """The number of steps whose samples are there."""
        return len(self._ahead)

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
        """Generate the samples of the first step that has none yet."""
        generated = self._rollouts.generate_batch(version, self._next_batch, recipe)
        self._next_batch += generated.batches
        return generated


@dataclass(frozen=True)
class SplitSyncReport:
    """The report of a sync on a rank that trains: its own, and on the first one the metrics of those that generate."""

    own: SyncReport
    others: StepMetrics

    @property
    def corrupted(self) -> tuple[str, ...]:
        return self.own.corrupted

    @property
    def dense_reason(self) -> str:
        return self.own.dense_reason

    @property
    def choice(self) -> Mapping[str, Any]:
        return self.own.choice

    def metrics(self) -> StepMetrics:
        metrics = self.own.metrics()
        metrics.add_rank(self.others)
        return metrics


class TrainingRank:
    """Implements `Roles` on a rank that trains. The first one asks the engines, and tells the others what it has got.

    Attributes:
        models: the models in the train layout; None if the run does not train.
        train, held_out: the prompts, the latter by the names of their files.
    """

    activities: Mapping[str, str] = {"generate": "wait", "eval": "wait"}

    def __init__(
        self,
        recipe: Recipe,
        training: TrainEngine,
        store: Store,
        group: dist.ProcessGroup,
        record: RunLogger,
        guard: Guard | None,
        weights_of: Path | None,
        start: int,
    ):
        """
        Args:
            training: builds the models in the train layout.
            group: the ranks that train; the default group.
            guard, weights_of: as for `Colocated`.
            start: number of this start of the ranks that train.
        """
        self._group = group
        self._others = WorkerServer(recipe, store, record, start) if group.rank() == 0 else None
        self._engines = None if self._others is None else self._others.engines
        config, tokenizer = read_config(recipe.model.path), read_tokenizer(recipe)
        self.train, self.held_out = read_data(recipe, config, tokenizer)
        if self._others is not None and self._engines is not None:
            scorers = make_scorers(recipe, self._engines, self._others.reward_workers, None)
            self._rollouts = make_rollouts(recipe, self._engines, scorers, self.train, self.held_out)
            self._ahead = GenerationAhead(self._rollouts)
        self._record = record
        self._policy = training.policy(config, recipe, group.rank(), trainable=guard is not None)
        if weights_of is not None:
            training.load_weights({"policy": self._policy}, weights_of, group)
        self._overlaps = guard is not None and recipe.overlaps_sync

        def make_sync(everyone: dist.ProcessGroup, weights: dist.ProcessGroup, ranks: tuple[int, ...]) -> Sync:
            return policy_sync(
                recipe, everyone, self._policy, overlaps=self._overlaps, transport_group=weights, ranks=ranks
            )

        self._sync = ElasticSync(store, make_sync)
        self._begun: Members | None = None  # of a sync that has begun during an update
        self._synced_before = False
        self._busy = Stopwatch()
        work_record.trains(recipe, group.rank())
        self.models: Models | None = None
        if guard is not None:
            self.models = Models.of(training, recipe, self._policy, group)
            self._learner = Learner(recipe, self.models, guard, tokenizer.pad_token_id, group)

    def sync(self, version: int, recipe: Recipe) -> SplitSyncReport:
        """Sync to this version, or finish the overlapped sync to it; again without ranks that are lost meanwhile."""
        members, self._begun = self._begun, None
        failed: Counter[tuple[int, ...]] = Counter()
        while True:
            if members is None:
                members = self._begin_sync(version, recipe)
            report, others = self._sync.finish(), StepMetrics()
            found = others if self._engines is None else self._engines.finish_sync()
            if all_reduce_min(int(report is not None and found is not None), self._group):
                assert report is not None
                assert found is not None
                self._record_start(recipe)
                return SplitSyncReport(report, found)
            self._sync.leave()
            if self._engines is not None:
                self._engines.fail_sync(self._sync.failure)
            failed[members.engines] += 1
            if failed[members.engines] == MAX_FAILED_SYNCS:
                raise RuntimeError(f"{MAX_FAILED_SYNCS} syncs of the same ranks failed: {self._sync.failure}")
            members = None

    def _begin_sync(self, version: int, recipe: Recipe) -> Members:
        verify = is_due(recipe.sync.verify, version)
        members = self._from_first(lambda engines: engines.members(recipe.active_generation_ranks))
        if self._engines is not None:
            self._engines.begin_sync(members, version, verify)
        self._sync.begin(members, version, verify)
        return members

    def _record_start(self, recipe: Recipe) -> None:
        """Record, after the first sync, what the ranks that generate have said of themselves."""
        generation_scores = recipe.reward.name == "code" and recipe.scoring_role == "generation"
        if not self._synced_before and self._engines is not None and generation_scores:
            confined_by = self._engines.confined_by or ""
            self._record.event("sandbox", sandbox.warning(confined_by), confined_by=confined_by)
        self._synced_before = True

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

    def make_experience(self, batch: RolloutBatch, step: int, recipe: Recipe) -> Experience:
        with self._busy:
            return self._learner.make_experience(batch, step, recipe)

    def update(self, experience: Experience, step: int, recipe: Recipe) -> StepMetrics:
        hook = self._overlap_hook(step + 1, recipe)
        if self._engines is not None:
            self._ahead.begin(step, recipe)
        with self._busy:
            metrics = self._learner.update(experience, step, recipe, hook)
        metrics.maxima["time/training_busy"] = self._busy.lap()
        if self._others is not None:
            self._ahead.end()
            metrics.maxima |= self._others.lap_busy_seconds()
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
        members, verify = self._sync.members, is_due(recipe.sync.verify, version)
        if not members:
            return None

        def hook(bucket: int, last: bool) -> None:
            if bucket == 0:
                self._begun = members
                if self._engines is not None:
                    self._engines.begin_sync(members, version, verify)
                self._sync.begin(members, version, verify)
            self._sync.bucket_ready(bucket, last)

        return hook

    @property
    def progress(self) -> Progress:
        return self._learner.progress

    def restore(self, progress: Progress, recipe: Recipe) -> None:
        self._learner.restore(progress, recipe)
        if self._engines is not None:
            self._rollouts.restore(progress.unfinished)

    def worker_spans(self, begin: float, end: float) -> Mapping[int, Sequence[Span]]:
        return {} if self._others is None else self._others.spans(begin, end)

    def pop_worker_peak_memory(self) -> Mapping[int, Peaks]:
        return {} if self._others is None else self._others.lap_peaks()

    def close(self, recipe: Recipe) -> None:
        dist.barrier(self._group)
        self._sync.leave()
        if self._others is not None:
            self._others.close()
        dist.barrier(self._group)
