"""Records steps of a run (`run.record`): samples, settings and state before, fingerprints and values after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hybrid3d import __version__
from hybrid3d.config import Recipe
from hybrid3d.config.schema import is_due
from hybrid3d.distributed import gather_to_first
from hybrid3d.generation.exchange import deliver_choices
from hybrid3d.generation.samples import RolloutBatch
from hybrid3d.replay.fingerprint import LocalFingerprints, fingerprint_pieces, whole_fingerprints
from hybrid3d.replay.step_record import PARTIAL, Array, StepRecord, WeightRecord, metrics_of_training, write_step
from hybrid3d.reshard.move.device import device
from hybrid3d.run.folder import RunFolder, recorded_folder
from hybrid3d.run.identity import RunIdentity
from hybrid3d.run.metrics import PhaseTimer
from hybrid3d.train.trained_model import TrainedModels
from hybrid3d.train.writing import together
from hybrid3d.trainer.checkpoints import Progress
from hybrid3d.trainer.models import Models
from hybrid3d.trainer.step_experience import Experience

OUTPUTS = {  # the record's names of an `Experience`'s tensors
    "logprobs": "old",
    "reference_logprobs": "reference",
    "values": "values",
    "advantages": "advantages",
    "returns": "returns",
    "correction": "correction",
}


class StepCapture:
    """Collects the record of one step on the group's first rank. All ranks call both methods, in this order.

    1. `StepCapture(...)`, after `make_experience` and before `update`, with the learner's progress before the step;
    2. `finish`, after `update`.
    """

    def __init__(self, models: Models, progress: Progress, group: dist.ProcessGroup):
        self._models, self._progress, self._group = models.trained, progress.learner, group
        self._is_reporting = models.policy.is_reporting_rank
        self._before = _fingerprints(self._models)

    def finish(
        self,
        step: int,
        recipe: Recipe,
        generated: RolloutBatch,
        experience: Experience,
        metrics: Mapping[str, float],
    ) -> StepRecord | None:
        """Return the record on the first rank, None on the others.

        `generated` is as it was before the experience was made; `metrics` are those of the step, reduced over ranks.
        """
        everything = [(range(len(generated.samples)), [0])]
        samples = deliver_choices(generated.samples, everything, self._group, recipe.machine.gpus_per_node)
        ends = gather_to_first((self._before, _fingerprints(self._models)), self._group)
        values = gather_to_first(_token_values(experience) if self._is_reporting else None, self._group)
        if ends is None or values is None:
            return None
        computed_by, token_values = _in_sample_order(values, len(samples))
        return StepRecord(
            step=step,
            settings=recipe,
            progress=self._progress,
            environment=environment(),
            samples=samples,
            rewards=np.array([sample.reward for sample in experience.samples], np.float64),
            computed_by=computed_by,
            token_values=token_values,
            metrics=metrics_of_training(metrics),
            weights={model: _weight_record([(b[model], a[model]) for b, a in ends]) for model in self._models},
            greedy=generated.greedy,
            baselines=np.array([sample.baseline for sample in experience.samples], np.float64),
        )


class StepRecorder:
    """Writes a record of each step that `run.record` selects. All ranks call both methods together, in this order.

    The run's identity is needed on the first rank only.
    """

    def __init__(
        self, models: Models, folder: RunFolder, group: dist.ProcessGroup, identity: RunIdentity | None = None
    ):
        self._models, self._folder, self._group, self._identity = models, folder, group, identity
        self._capture: StepCapture | None = None

    @property
    def is_recording(self) -> bool:
        """Whether `begin` has captured the step."""
        return self._capture is not None

    def begin(self, step: int, recipe: Recipe, progress: Progress, timer: PhaseTimer) -> None:
        """Capture the state before the models are updated, if the step is to be recorded."""
        self._capture = None
        if step < recipe.run.steps and is_due(recipe.run.record, step):
            with timer("record"):
                self._capture = StepCapture(self._models, progress, self._group)

    def finish(
        self,
        step: int,
        recipe: Recipe,
        generated: RolloutBatch,
        experience: Experience,
        metrics: Mapping[str, float],
        timer: PhaseTimer,
    ) -> None:
        """Write the record, if `begin` has captured the step.

        If that fails, `CheckpointWriteError` is raised, and nothing of the record is left.
        """
        if self._capture is None:
            return
        with timer("record"):
            record = self._capture.finish(step, recipe, generated, experience, metrics)
            folder = recorded_folder(self._folder, step)
            identity = self._identity.of_step(folder, step) if self._identity is not None else None
            write = partial(write_step, folder, record, identity) if record is not None else lambda: None
            together(folder.with_name(folder.name + PARTIAL), write, self._group)
        self._capture = None


def environment() -> dict[str, Any]:
    """Return what besides settings may change the last digits of results: versions, device and threads."""
    on = device()
    return {
        "hybrid3d": __version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(on) if on.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
    }


def _fingerprints(models: TrainedModels) -> dict[str, LocalFingerprints]:
    for model in models.values():
        model.onload("parameters")
    return {name: fingerprint_pieces(model.trained_source()) for name, model in models.items()}


def _token_values(experience: Experience) -> tuple[list[int], list[int], dict[str, Array]]:
    """Return the samples of this rank, their numbers of values, and the values of all their tokens in a row."""
    mask = experience.batch.response_mask.bool()
    tensors = {name: getattr(experience, attribute) for name, attribute in OUTPUTS.items()}
    values = {name: t[mask].float().cpu().numpy() for name, t in tensors.items() if t is not None}
    return experience.rows, mask.sum(1).tolist(), values


def _in_sample_order(
    ranks: Sequence[tuple[list[int], list[int], dict[str, Array]] | None], count: int
) -> tuple[Array, dict[str, Array]]:
    """Return which rank computed each sample, and the values of all samples' tokens by name."""
    computed_by, parts = np.full(count, -1, np.int32), dict[str, list[Array]]()
    for rank, found in enumerate(ranks):
        if found is None:
            continue
        rows, lengths, values = found
        for name, joined in values.items():
            by_sample = parts.setdefault(name, [np.empty(0, np.float32)] * count)
            for row, part in zip(rows, np.split(joined, np.cumsum(lengths)[:-1]), strict=True):
                if row < count:  # the others only fill the batch
                    by_sample[row] = part
        computed_by[[row for row in rows if row < count]] = rank
    return computed_by, {name: np.concatenate(by_sample) for name, by_sample in parts.items()}


def _weight_record(ranks: Sequence[tuple[LocalFingerprints, LocalFingerprints]]) -> WeightRecord:
    names = list(dict.fromkeys(name for before, _ in ranks for name in before.values))
    index = {name: number for number, name in enumerate(names)}
    whole = [whole_fingerprints(of) for of in zip(*ranks, strict=True)]
    rows = [(rank, name) for rank, (before, _) in enumerate(ranks) for name in before.values]
    return WeightRecord(
        tensors=tuple(names),
        rank=np.array([rank for rank, _ in rows], np.int32),
        tensor=np.array([index[name] for _, name in rows], np.int32),
        before=np.array([ranks[rank][0].values[name] for rank, name in rows], np.uint64),
        after=np.array([ranks[rank][1].values[name] for rank, name in rows], np.uint64),
        whole_before=np.array([whole[0][name] for name in names], np.uint64),
        whole_after=np.array([whole[1][name] for name in names], np.uint64),
    )
