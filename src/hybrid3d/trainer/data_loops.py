"""The training loop of what learns from answers in the data, `sft` and `dpo`; imports no rollout engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch.distributed as dist

from hybrid3d.config import Recipe
from hybrid3d.rl.data import PromptData
from hybrid3d.run.health import Guard
from hybrid3d.run.live_settings import LiveSettings
from hybrid3d.run.logger import Record
from hybrid3d.run.metrics import PhaseTimer, StepMetrics
from hybrid3d.train.megatron.model import StepReport
from hybrid3d.train.megatron.policy import Policy
from hybrid3d.trainer.activity import gather_activity
from hybrid3d.trainer.checkpoints import Checkpoints
from hybrid3d.watch.work_meter import record as work_record


@dataclass(frozen=True)
class Update:
    """The result of a step's update.

    Attributes:
        metrics: of the policy before the update.
        tokens: number of the step's tokens, over all ranks.
    """

    report: StepReport
    metrics: StepMetrics
    tokens: int


class DataUpdates(Protocol):
    """Updates the policy with a step's data. All ranks call both methods together.

    Attributes:
        data: the files, by the names of `Record.data`.
        evaluates: whether there is held-out data to evaluate.
    """

    @property
    def data(self) -> Mapping[str, PromptData]: ...

    @property
    def evaluates(self) -> bool: ...

    def update(self, step: int, recipe: Recipe, accepts_grad_norm: Callable[[float], bool]) -> Update:
        """Update the policy once."""

    def evaluate(self, recipe: Recipe) -> StepMetrics:
        """Return metrics of the held-out data."""


def train_on_data(
    updates: DataUpdates,
    policy: Policy,
    live: LiveSettings,
    guard: Guard,
    checkpoints: Checkpoints,
    record: Record,
    group: dist.ProcessGroup,
) -> None:
    """Train from the last checkpoint in the run's folder, or from the start, to the recipe's last step.

    Row s of the metrics has the loss of policy version s, computed before update s + 1. The last version has a row only
    if it is evaluated.
    """
    record.data(updates.data)
    work_record.trains(live.recipe, group.rank())
    with checkpoints:
        step, progress = checkpoints.resume()
        live.restore(progress)
        if progress:
            guard.restore(progress["guard"])
        while step < (recipe := live.settings_for_step(step)).run.steps:
            work_record.begin_step(step)
            timer, row = PhaseTimer(), dict[str, float](step=step)
            if updates.evaluates and step % recipe.run.eval_every == 0:
                with timer("eval"):
                    row |= updates.evaluate(recipe).reduce(group)
            with timer("train"):
                update = updates.update(step, recipe, partial(guard.accepts_grad_norm, recipe=recipe))
                policy.end_step()
            report = update.report
            if not report.updated:
                guard.record_skip(step, report.grad_norm, recipe)
            row |= {"train/grad_norm": report.grad_norm, "train/lr": report.lr} | update.metrics.reduce(group)
            row |= timer.row(update.tokens)
            record.step(row, recipe.run.steps)
            activity = gather_activity(timer, group)
            record.memory(step, activity.peaks)
            guard.check_bounds(row, activity.peak_gb, recipe)
            step += 1
            checkpoints.save_if_due(step, {"guard": guard.progress} | live.progress, recipe.run)
        if updates.evaluates:
            with PhaseTimer()("eval"):
                metrics = updates.evaluate(recipe).reduce(group)
            record.step({"step": step} | metrics, recipe.run.steps)
