"""What is written down of a step: metrics, events, samples, times and memory, and the whole step where that is due."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace

import torch.distributed as dist

from hybrid3d.config import Recipe
from hybrid3d.generation.evaluation import EvalResult
from hybrid3d.generation.samples import RolloutBatch
from hybrid3d.run.health import Guard
from hybrid3d.run.logger import RunLogger
from hybrid3d.run.metrics import PhaseTimer, StepMetrics, peak_gb
from hybrid3d.sync import SyncReport
from hybrid3d.trainer.step_experience import Experience
from hybrid3d.trainer.step_recorder import StepRecorder
from hybrid3d.trainer.trainer import Trainer
from hybrid3d.watch.work_meter import record as work_record


class StepLog:
    """Writes down the steps of RL. Every rank that trains makes all calls together, in the order of the methods."""

    def __init__(
        self,
        trainer: Trainer,
        record: RunLogger,
        recorder: StepRecorder,
        guard: Guard,
        group: dist.ProcessGroup,
    ):
        self._trainer, self._record, self._recorder = trainer, record, recorder
        self._guard, self._group = guard, group
        self._dense_reason: str | None = None
        self._sync_choice, self._told_truncated = "", False

    def begin(self, step: int, recipe: Recipe) -> None:
        """Begin a step, with its settings."""
        work_record.begin_step(step)
        assert recipe.rollout is not None, "checked when the recipe was read"
        self._step, self._recipe, self._rollout = step, recipe, recipe.rollout
        self._timer, self._row = PhaseTimer(self._trainer.activities), dict[str, float](step=step)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Time a phase of the step; it may be entered several times."""
        return self._timer(name)

    def synced(self, report: SyncReport) -> None:
        """Take in the sync, and tell what is unusual of it, or of the samples that follow it.

        That is tensors that arrived corrupted, and why a sync sends all elements where it was not so before.
        """
        self._synced = report
        step, tensors = self._step, report.corrupted
        if tensors:
            message = f"step {step}: {len(tensors)} tensors were corrupted in transfer; the whole sync was repeated"
            self._record.event("sync_corrupted", message, step=step, count=len(tensors), tensors=tensors[:20])
        if report.dense_reason and report.dense_reason != self._dense_reason:
            self._record.event("sync_dense", step=step, reason=report.dense_reason)
        self._dense_reason = report.dense_reason
        if report.choice and report.choice["sends"] != self._sync_choice:
            self._sync_choice = report.choice["sends"]
            self._record.event("sync_choice", step=step, **report.choice)
        self._tell_of_truncation()

    def evaluated(self, result: EvalResult) -> None:
        """Take in an evaluation."""
        self._tell_of_failures(result)
        self._row |= result.metrics

    def generated(self, batch: RolloutBatch) -> None:
        """Take in the step's samples."""
        self._tell_of_failures(batch)

    def made(self, batch: RolloutBatch, experience: Experience) -> tuple[RolloutBatch, Experience]:
        """Take in the step's experience, before the models are updated.

        Returns:
            Both as the update needs them: the samples, which all ranks have, are kept where they are written.
        """
        with self._timer("train"):
            self._row |= batch.metrics(experience.samples, self._rollout, self._step)
            self._tokens = sum(len(sample.prompt_ids) + len(sample.tokens) for sample in experience.samples)
        self._recorder.begin(self._step, self._recipe, self._trainer.progress, self._timer)
        if self._group.rank() and not self._recorder.is_recording:
            # The experience's tensors have the rows that this rank trains on
            experience = replace(experience, samples=[sample.emptied() for sample in experience.samples])
            batch = replace(batch, samples=[], greedy=[])
        return batch, experience

    def finish(self, batch: RolloutBatch, experience: Experience, updates: StepMetrics) -> None:
        """End the step: reduce its metrics over all ranks and write them, with all that was measured.

        `batch` and `experience` are as `made` has returned them; `updates` has this rank's metrics of the updates.
        """
        step, recipe, row = self._step, self._recipe, self._row
        metrics = experience.metrics
        metrics.update(self._synced.metrics())
        metrics.update(updates)
        with self._timer("wait"):  # for the slowest rank
            row |= metrics.reduce(self._group)
        self._recorder.finish(step, recipe, batch, experience, row, self._timer)
        row |= self._timer.row(self._tokens)
        self._record.step(row, recipe.run.steps, experience.samples)
        workers, (_, begin, _), (_, _, end) = self._trainer.workers, self._timer.spans[0], self._timer.spans[-1]
        others = (workers.spans(begin, end), workers.lap_peaks()) if workers is not None else ()
        spans, peaks = self._timer.gather(self._group, *others)
        self._record.memory(step, peaks)
        if step < recipe.run.steps:
            self._record.timeline(step, recipe.role_ranks, spans, peaks)
        self._guard.check_bounds(row, peak_gb(peaks), recipe)

    def close(self) -> None:
        """Draw the timeline of the last step."""
        self._record.draw_timeline()

    def _tell_of_failures(self, result: RolloutBatch | EvalResult) -> None:
        """Tell of rewards and environment replies that failed; their samples have the recipe's default reward."""
        if result.failures:
            held_out = isinstance(result, EvalResult)
            counts = ", ".join(f"{count} {kind}" for kind, count in sorted(result.failures.items()))
            where = "failed on held-out problems" if held_out else "failed"
            message = f"step {self._step}: {where}: {counts}; for example: {next(iter(result.examples.values()))}"
            fields = {"failures": result.failures, "examples": result.examples, "held_out": held_out}
            self._record.event("reward_failed", message, step=self._step, **fields)

    def _tell_of_truncation(self) -> None:
        """Tell, once, that samples are of a part of the tokens only, which training does not know of."""
        truncations = self._rollout.truncations
        if truncations and not self._told_truncated:
            settings = ", ".join(f"rollout.{key}={value:g}" for key, value in truncations.items())
            message = (
                f"step {self._step}: {settings}: samples are of a truncated distribution, and training has the "
                "probabilities of the whole one (rollout/kept_probability_mean)"
            )
            self._record.event("sampling_truncated", message, step=self._step, **truncations)
            self._told_truncated = True
