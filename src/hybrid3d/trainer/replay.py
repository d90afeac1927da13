"""Does recorded training steps again, without a rollout engine, and compares the results with those recorded.

A replay is shown as a table, and a comparison of runs as sentences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from hybrid3d.config import Recipe
from hybrid3d.inputs.models import read_config, read_tokenizer
from hybrid3d.replay.comparison import INPUTS, Comparison, Difference, first_difference
from hybrid3d.replay.plan import training_recipe
from hybrid3d.replay.step_record import StepRecord, read_step
from hybrid3d.reshard.move.device import ON_CUDA
from hybrid3d.run.folder import checkpoint_folder, recorded_folder
from hybrid3d.run.health import MAX_EXPLAINED_MISMATCH, Guard, least_precise
from hybrid3d.run.live_settings import override_settings
from hybrid3d.run.logger import RunLogger
from hybrid3d.train.megatron import checkpoint
from hybrid3d.train.megatron.policy import Policy
from hybrid3d.trainer.checkpoints import Progress
from hybrid3d.trainer.learner import Learner
from hybrid3d.trainer.models import Models
from hybrid3d.trainer.step_recorder import StepCapture


@dataclass(frozen=True)
class ReplayReport:
    """What replayed steps were like, beside the recorded ones.

    Attributes:
        start, step: the first and the last step that were replayed.
        same_layout: whether every setting that decides on the order of sums is that of the run.
        metrics: by metric of the last step, its recorded and its replayed value.
        largest: by name, the largest absolute difference of a token's value in the last step.
        mean_logprob_difference: mean absolute difference of the policy's log-probabilities in the last step, in nats.
        bound: of this mean, up to which another layout explains it.
        difference: the first thing in any step that is not equal bit for bit; None if there is none.
    """

    start: int
    step: int
    same_layout: bool
    metrics: Mapping[str, tuple[float | None, float | None]]
    largest: Mapping[str, float]
    mean_logprob_difference: float
    bound: float
    difference: Difference | None

    @property
    def as_recorded(self) -> bool:
        """Whether the steps are equal bit for bit or, in another layout, as close as rounding explains."""
        first = self.difference
        if self.same_layout or first is None:
            return first is None
        starts_elsewhere = first.step == self.start and first.what in INPUTS  # it is exact in any layout
        return not starts_elsewhere and self.mean_logprob_difference <= self.bound

    def as_json(self) -> dict[str, Any]:
        """Return the attributes, with `difference` as `first_difference`, and `equal` and `as_recorded`."""
        return {
            "as_recorded": self.as_recorded,
            "equal": self.difference is None,
            "start": self.start,
            "step": self.step,
            "same_layout": self.same_layout,
            "first_difference": None if self.difference is None else self.difference.as_json(),
            "metrics": {key: {"recorded": a, "replayed": b} for key, (a, b) in self.metrics.items()},
            "largest_differences": dict(self.largest),
            "mean_logprob_difference": self.mean_logprob_difference,
            "mean_logprob_bound": self.bound,
        }


def replay(
    recipe: Recipe,
    overrides: Sequence[str],
    start: int,
    step: int,
    record: RunLogger,
    group: dist.ProcessGroup,
) -> ReplayReport | None:
    """Replay the recorded steps from `start` to `step`. All ranks of the group call it.

    Args:
        recipe: of the run, as `training_recipe` returns it with these overrides.
        start: the step of a checkpoint, or 0 for the model before training.
        record: of the run; nothing is written to it.

    Returns:
        The report on the first rank, None on the others.

    Raises:
        BrokenCheckpoint, BrokenRecord: the checkpoint or a recorded step is damaged.
    """
    policy = Policy(read_config(recipe.model.path), recipe, group.rank())
    models = Models.of(recipe, policy, group)
    learner = Learner(recipe, models, Guard(record), read_tokenizer(recipe).pad_token_id, group)
    if start:
        saved = checkpoint.load(models.trained, checkpoint_folder(record.folder, start), group)
        progress = Progress.from_json(saved)
        changed = progress.control["settings"]  # of these, the learner's state depends on those of the KL only
        settings = {key: value for key, value in changed.items() if key.startswith("algorithm.kl.")}
        learner.restore(progress, override_settings(recipe, settings))
    report = None
    for number in range(start, step + 1):
        recorded = read_step(recorded_folder(record.folder, number))
        now = training_recipe(recorded.settings, overrides)
        same_layout = _summation(now) == _summation(recorded.settings)
        if same_layout and not ON_CUDA:
            torch.set_num_threads(recorded.environment["threads"])
        replayed = _replay_step(learner, models, recorded, now, group)
        if replayed is not None:
            earlier = report.difference if report is not None else None
            report = _report(start, recorded, replayed, same_layout, models.policy.has_experts, earlier)
    return report


def _replay_step(
    learner: Learner, models: Models, recorded: StepRecord, recipe: Recipe, group: dist.ProcessGroup
) -> StepRecord | None:
    """Do a recorded step again; return its record on the first rank, with the recorded settings but for `train`."""
    experience = learner.make_experience(recorded.generated, recorded.step, recipe)
    capture = StepCapture(models, learner.progress, group)
    metrics = experience.metrics
    metrics.update(learner.update(experience, recorded.step, recipe))
    settings = replace(recorded.settings, train=recipe.train)
    return capture.finish(recorded.step, settings, recorded.generated, experience, metrics.reduce(group))


def _summation(recipe: Recipe) -> Any:
    """Return the settings of `train` that decide on the order of sums."""
    return replace(recipe.train, offload_parameters=False, offload_gradients=False, offload_optimizer=False)


def _report(
    start: int,
    recorded: StepRecord,
    replayed: StepRecord,
    same_layout: bool,
    has_experts: bool,
    earlier: Difference | None,
) -> ReplayReport:
    gaps = {
        name: np.abs(values - replayed.token_values[name])
        for name, values in recorded.token_values.items()
        if name in replayed.token_values
    }
    keys = sorted(recorded.metrics.keys() | replayed.metrics.keys())
    dtypes = [least_precise(training_recipe(one.settings))[0] for one in (recorded, replayed)]
    return ReplayReport(
        start=start,
        step=recorded.step,
        same_layout=same_layout,
        metrics={key: (recorded.metrics.get(key), replayed.metrics.get(key)) for key in keys},
        largest={name: float(gap.max(initial=0.0)) for name, gap in gaps.items()},
        mean_logprob_difference=float(gaps["logprobs"].mean(dtype=np.float64)),
        bound=max(MAX_EXPLAINED_MISMATCH[dtype][has_experts] for dtype in dtypes),
        difference=earlier or first_difference(recorded, replayed),
    )


def print_replay(report: Mapping[str, Any], console: Console) -> None:
    """Print a replay, as `ReplayReport.as_json` returns it: metrics beside the recorded ones, and what was found."""
    table = Table("metric", "recorded", "replayed", "difference")
    for key, values in report["metrics"].items():
        a, b = values["recorded"], values["replayed"]
        gap = "equal" if a == b else f"{b - a:.3g}" if a is not None and b is not None else ""
        table.add_row(key, *("" if value is None else f"{value:.9g}" for value in (a, b)), gap)
    for name, gap in report["largest_differences"].items():
        table.add_row(f"tokens: {name}", "", "", "equal" if gap == 0 else f"at most {gap:.3g}")
    console.print(table)
    for line in replay_lines(report):
        console.print(line, soft_wrap=True)


def replay_lines(report: Mapping[str, Any]) -> list[str]:
    """Return what a replay has found, in sentences."""
    steps = f"step {report['step']}"
    if report["start"] < report["step"]:
        steps = f"steps {report['start']} to {report['step']}"
    if report["equal"]:
        return [f"{steps}: equal bit for bit, updated weights included"]
    first = f"first difference: {report['first_difference']['message']} (recorded and replayed)"
    if report["same_layout"]:
        return [f"{steps}: not as recorded", first]
    mean, bound = report["mean_logprob_difference"], report["mean_logprob_bound"]
    verdict = "as recorded, up to rounding in another layout" if report["as_recorded"] else "not as recorded"
    told = f"log-probabilities differ by {mean:.3g} nats on average, and rounding explains up to {bound:g}"
    return [f"{steps}: {verdict}: {told}", first]


def print_comparison(comparison: Comparison, names: tuple[str, str], console: Console) -> None:
    """Print the comparison of two runs of these names."""
    for note in comparison.notes:
        console.print(f"note: {note}", soft_wrap=True)
    steps = comparison.steps
    compared = f"recorded steps that were compared: {len(steps)}, from {steps[0]} to {steps[-1]}"
    if comparison.difference is None:
        console.print(f"{names[0]} and {names[1]} are equal bit for bit: {compared}", soft_wrap=True)
    else:
        message = f"{names[0]} and {names[1]} differ first at {comparison.difference} ({compared})"
        console.print(message, soft_wrap=True)
