"""A recorded step: what it was trained with, and fingerprints of what came out; on disk and in memory.

`docs/run-folder.md` describes the files. Only JSON, YAML and safetensors are written and read: nothing is unpickled.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from hybrid3d.config import Recipe, load_recipe, recipe_to_yaml
from hybrid3d.errors import UserMistake
from hybrid3d.generation.engine import NO_CHOICES, ExpertChoices, joined
from hybrid3d.generation.samples import RolloutBatch, Sample
from hybrid3d.storage import manifest
from hybrid3d.storage.user_files import read_json_file

FORMAT = 1
SETTINGS, STEP, SAMPLES = "settings.yaml", "step.json", "samples.safetensors"
EXPERIENCE, FINGERPRINTS = "experience.safetensors", "fingerprints.safetensors"
FILES = (SETTINGS, STEP, SAMPLES, EXPERIENCE, FINGERPRINTS)
GREEDY = "greedy/"  # prefix of the arrays of greedy answers
PARTIAL = ".partial"  # suffix of a folder that is being written
METRICS = ("train/", "critic/", "mismatch/")  # the groups that a recorded step keeps

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


class BrokenRecord(UserMistake):
    """A recorded step cannot be used: its files do not belong together, or are of another version of the format."""


@dataclass(frozen=True, eq=False)
class WeightRecord:
    """Fingerprints (`replay/fingerprint.py`) of a model's weights before and after a step, uint64."""

    tensors: tuple[str, ...]  # names of the n canonical tensors, first layers first
    rank: Array  # [k], for each tensor that a rank has boxes of, the rank
    tensor: Array  # [k], and the tensor's index
    before: Array  # [k], the fingerprints of these boxes
    after: Array
    whole_before: Array  # [n], of the whole tensors
    whole_after: Array


ARRAYS = ("rank", "tensor", "before", "after", "whole_before", "whole_after")  # of a `WeightRecord`


@dataclass(frozen=True, eq=False)
class StepRecord:
    """What a step was trained with, and what came out.

    `token_values` are float32 values of the policy's tokens, sample after sample, by name: `logprobs` (before the
    update), `reference_logprobs`, `values`, `advantages`, `returns` and `correction`, where there are such.
    """

    step: int
    settings: Recipe  # with the settings of the step
    progress: Mapping[str, Any]  # the learner's state besides models before the step, as in a checkpoint
    environment: Mapping[str, Any]  # versions, device and number of threads of rank 0
    samples: Sequence[Sample]  # B samples as they were generated, without texts
    rewards: Array  # [B] float64, with which the step was trained: those of the samples, or of a reward model
    computed_by: Array  # [B] int32, the rank that computed each sample's log-probabilities and advantages
    token_values: Mapping[str, Array]
    metrics: Mapping[str, float | None]  # of training; None for a number that is not finite
    weights: Mapping[str, WeightRecord]  # by model, `policy` or `critic`
    greedy: Sequence[Sample] = ()  # the greedy answers of a `RolloutBatch`, likewise without texts
    baselines: Array = field(default_factory=lambda: np.zeros(0))  # [B] float64, their rewards; empty in older records

    @property
    def generated(self) -> RolloutBatch:
        return RolloutBatch([*self.samples], greedy=[*self.greedy])


def metrics_of_training(row: Mapping[str, float]) -> dict[str, float | None]:
    kept = {key: value for key, value in row.items() if key.startswith(METRICS)}
    return {key: value if math.isfinite(value) else None for key, value in sorted(kept.items())}


def write_step(folder: Path, record: StepRecord, identity: manifest.Identity | None = None) -> None:
    """Write a recorded step to a folder, which gets its name when it is complete. OSError: it cannot be written."""
    unfinished = folder.with_name(folder.name + PARTIAL)
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    (unfinished / SETTINGS).write_text(recipe_to_yaml(record.settings), encoding="utf-8")
    told = {
        "format": FORMAT,
        "step": record.step,
        "environment": record.environment,
        "progress": record.progress,
        "metrics": record.metrics,
        "tensors": {model: weights.tensors for model, weights in record.weights.items()},
    }
    (unfinished / STEP).write_text(json.dumps(told, indent=1), encoding="utf-8")
    greedy = {f"{GREEDY}{key}": array for key, array in _sample_arrays(record.greedy).items()} if record.greedy else {}
    _save(unfinished / SAMPLES, _sample_arrays(record.samples) | greedy)
    experience = {"rewards": record.rewards, "computed_by": record.computed_by, **record.token_values}
    experience |= {"baselines": record.baselines} if len(record.baselines) else {}
    _save(unfinished / EXPERIENCE, experience)
    models = record.weights.items()
    _save(unfinished / FINGERPRINTS, {f"{model}/{key}": getattr(w, key) for model, w in models for key in ARRAYS})
    names = manifest.list_files(unfinished)
    manifest.write(unfinished, {name: manifest.fsync_and_crc(unfinished / name) for name in names}, identity)
    manifest.fsync_folder(unfinished)
    shutil.rmtree(folder, ignore_errors=True)
    os.rename(unfinished, folder)
    manifest.fsync_folder(folder.parent)


def read_step(folder: Path) -> StepRecord:
    """Read a recorded step, after checking its files against its manifest.

    Raises:
        BrokenCheckpoint: a file is missing or differs from what was written.
        BrokenRecord: its files do not belong together, or are of another version of the format.
    """
    missing = [name for name in FILES if name not in manifest.read_manifest(folder)]
    if missing:
        raise BrokenRecord(f"{folder} does not list {missing[0]}, which every record has")
    manifest.check(folder)
    try:
        told = read_json_file(folder / STEP)
        number = re.fullmatch(r"step-(\d{6,})", folder.name)
        if number is not None and told["step"] != int(number[1]):
            raise BrokenRecord(f"{folder} is the record of step {told['step']}, expected {int(number[1])}")
        if told["format"] != FORMAT:
            raise BrokenRecord(f"{folder} is of format {told['format']}, and this version reads format {FORMAT}")
        experience = load_file(folder / EXPERIENCE)
        fingerprints = load_file(folder / FINGERPRINTS)
        settings, samples = load_recipe(folder / SETTINGS), load_file(folder / SAMPLES)
        greedy = {key.removeprefix(GREEDY): samples.pop(key) for key in [*samples] if key.startswith(GREEDY)}
        return StepRecord(
            step=told["step"],
            settings=settings,
            progress=told["progress"],
            environment=told["environment"],
            samples=_samples(samples, settings),
            greedy=_samples(greedy, settings) if greedy else (),
            rewards=experience.pop("rewards"),
            computed_by=experience.pop("computed_by"),
            baselines=experience.pop("baselines", np.zeros(0)),
            token_values=experience,
            metrics=told["metrics"],
            weights={
                model: WeightRecord(tuple(tensors), **{key: fingerprints[f"{model}/{key}"] for key in ARRAYS})
                for model, tensors in told["tensors"].items()
            },
        )
    except (KeyError, TypeError, ValueError, AttributeError, SafetensorError) as error:
        raise BrokenRecord(f"{folder} is no recorded step: {type(error).__name__}: {error}") from None


def _save(path: Path, arrays: Mapping[str, Array]) -> None:
    path.write_bytes(save({name: np.ascontiguousarray(array) for name, array in arrays.items()}))


def _sample_arrays(samples: Sequence[Sample]) -> dict[str, Array]:
    def in_a_row(parts: Sequence[ArrayLike], dtype: type) -> Array:
        return np.concatenate([np.asarray(part, dtype) for part in parts]) if parts else np.zeros(0, dtype)

    return {
        "prompt_lengths": np.array([len(sample.prompt_ids) for sample in samples], np.int32),
        "prompt_ids": in_a_row([sample.prompt_ids for sample in samples], np.int32),
        "lengths": np.array([len(sample.tokens) for sample in samples], np.int32),
        "tokens": in_a_row([sample.tokens for sample in samples], np.int32),
        "loss_mask": in_a_row([sample.loss_mask for sample in samples], np.bool_),
        "versions": in_a_row([[*sample.versions] for sample in samples], np.int32),
        "logprobs": in_a_row([sample.logprobs for sample in samples], np.float64),
        "rewards": np.array([sample.reward for sample in samples], np.float64),
        "scored": np.array([sample.scored for sample in samples], np.bool_),
        "last": np.array([sample.last for sample in samples], np.bool_),
        "branches": np.array([sample.branch for sample in samples], np.int32),
        "truncated": np.array([sample.truncated for sample in samples], np.bool_),
        "baselines": np.array([sample.baseline for sample in samples], np.float64),
        "baseline_tokens": np.array([sample.baseline_tokens for sample in samples], np.int32),
        "expert_lengths": np.array([len(sample.experts) for sample in samples], np.int32),
        "experts": joined([sample.experts for sample in samples]),
    }


def _samples(arrays: Mapping[str, Array], settings: Recipe) -> list[Sample]:
    assert settings.rollout is not None, "samples were generated"
    tokens, masks, versions = (_split(arrays[key], arrays["lengths"]) for key in ("tokens", "loss_mask", "versions"))
    has_logprobs = len(arrays["logprobs"]) > 0  # greedy answers have none
    logprobs = _split(arrays["logprobs"], np.array([mask.sum() * has_logprobs for mask in masks], np.int64))
    rewards = arrays["rewards"].tolist()
    missing = np.zeros(len(rewards), np.int32)  # in older records
    by_length = arrays["lengths"] >= settings.rollout.max_new_tokens  # which older versions went by
    columns = {
        "prompt_ids": _split(arrays["prompt_ids"], arrays["prompt_lengths"]),
        "tokens": tokens,
        "loss_mask": masks,
        "logprobs": logprobs,
        "reward": rewards,
        "versions": versions,
        "scored": arrays.get("scored", missing.astype(bool)).tolist(),
        "branch": arrays.get("branches", missing).tolist(),
        "last": arrays.get("last", missing == 0).tolist(),
        "truncated": arrays.get("truncated", by_length).tolist(),
        "baseline": arrays.get("baselines", missing).tolist(),
        "baseline_tokens": arrays.get("baseline_tokens", missing).tolist(),
        "experts": _experts(arrays, len(rewards)),
    }
    rows = zip(*columns.values(), strict=True)
    return [Sample(prompt="", answer="", **dict(zip(columns, row, strict=True))) for row in rows]


def _experts(arrays: Mapping[str, Array], samples: int) -> list[ExpertChoices]:
    if "experts" not in arrays or not arrays["experts"].size:  # older records have none
        return [NO_CHOICES] * samples
    experts, lengths = arrays["experts"], arrays["expert_lengths"]
    if len(lengths) != samples or lengths.sum() != len(experts):
        raise ValueError(f"choices of {samples} samples expected, {len(experts)} tokens of {len(lengths)} found")
    return [ExpertChoices.of(part) if len(part) else NO_CHOICES for part in _split(experts, lengths)]


def _split(joined: Array, lengths: Array) -> list[Array]:
    """Return the parts of these lengths. ValueError: they do not add up to the whole."""
    ends = [0, *np.cumsum(lengths).tolist()]
    if ends[-1] != len(joined):
        raise ValueError(f"{ends[-1]} values expected, {len(joined)} found")
    return [joined[low:high] for low, high in pairwise(ends)]
