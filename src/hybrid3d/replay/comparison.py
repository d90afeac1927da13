"""Compares recorded steps bit for bit, and names the first thing that differs, in the order of cause and effect."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from hybrid3d.config import Recipe
from hybrid3d.config.schema import flatten_settings, to_raw
from hybrid3d.generation.engine import ExpertChoices
from hybrid3d.replay.plan import NotRecorded
from hybrid3d.replay.step_record import Array, StepRecord, WeightRecord, read_step
from hybrid3d.run.folder import RunFolder, recorded_folder, recorded_steps
from hybrid3d.run.identity import check_origin

# Settings that decide on what a step computes from its weights and samples. Others may differ between equal runs.
CAUSES = (
    *("model.dtype", "train.expert_bias_update_rate", "train.router_replay"),
    *("train.fp8", "train.mtp_loss_coef", "lora.rank", "lora.alpha", "lora.target_modules"),
    *("rollout.temperature", "rollout.max_new_tokens"),
    *("reward.model", "debug.shuffle_rewards", "reward.overlong_buffer", "reward.min", "reward.max", "reward.whiten"),
    *("reward.coef", "algorithm.*", "optimizer.*", "critic.*", "run.seed"),
    *("guard.spike", "guard.kl_explosion"),
)
BEFORE, AFTER = "weights before the step", "updated weights"
INPUTS = ("settings", BEFORE, "progress", "samples")  # kinds of differences that no layout explains
NO_CAUSES = ("name", "run.dir")  # which differ between any two runs
TOKEN_VALUES = {  # of the policy's tokens, in the order in which they are computed
    "logprobs": "log-probabilities of the policy",
    "reference_logprobs": "log-probabilities of the reference",
    "values": "values of the critic",
    "advantages": "advantages",
    "returns": "returns",
    "correction": "weights of algorithm.correction",
}
LAYOUT = ("tp", "pp", "vpp", "ep", "etp", "cp", "dp", "first_stage_layers", "last_stage_layers")  # of `train`
SAMPLE_FIELDS = {
    "prompt_ids": "tokens of the prompt",
    "tokens": "tokens of the answer",
    "loss_mask": "loss mask",
    "versions": "weight versions",
    "logprobs": "log-probabilities of the rollout",
    "experts": "experts of the rollout",
    "truncated": "mark of a cut answer",
    "branch": "number of the branch",
    "last": "mark of the last branch",
    "scored": "mark of a known reward",
    "baseline_tokens": "length of the greedy answer",
}
FIRST_METRICS = ("critic/grad_norm", "train/grad_norm", "critic/lr", "train/lr")  # what the updates depend on


@dataclass(frozen=True)
class Difference:
    """The first thing that differs between two records."""

    step: int
    what: str  # one of `INPUTS`, `rewards`, a text of `TOKEN_VALUES`, a metric, or `updated weights`
    where: str  # the setting, the sample and token, or the tensor
    values: tuple[str, str]  # of both records, as text
    rank: int | None = None  # that computed it; None if it is the same on all ranks, or if the layouts differ
    tensor: str | None = None  # the canonical tensor, as `policy/NAME` or `critic/NAME`; None if it is none
    others: str = ""  # how much else of the same kind differs, in words

    def __str__(self) -> str:
        rank = "" if self.rank is None else f"on rank {self.rank}, "
        more = f" ({self.others})" if self.others else ""
        return f"step {self.step}: {self.what}: {rank}{self.where}: {self.values[0]} and {self.values[1]}{more}"

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "message": str(self)}


@dataclass(frozen=True)
class Comparison:
    """The comparison of two runs in the steps that both have; without a difference they are equal there.

    The notes are sentences on what differs without being a difference of results.
    """

    steps: Sequence[int]
    notes: Sequence[str]
    difference: Difference | None

    def as_json(self) -> dict[str, Any]:
        return {
            "equal": self.difference is None,
            "steps": list(self.steps),
            "notes": list(self.notes),
            "first_difference": None if self.difference is None else self.difference.as_json(),
        }


def compare_runs(one: RunFolder, other: RunFolder) -> Comparison:
    """Compare all steps that both runs have recorded, up to the first difference.

    Raises:
        NotRecorded: there is no such step.
        BrokenCheckpoint, BrokenRecord: a recorded step cannot be read.
    """
    steps = [recorded_steps(folder) for folder in (one, other)]
    common = sorted(set(steps[0]) & set(steps[1]))
    if not common:
        counts = " and ".join(
            f"{folder.path} has {len(of)} recorded steps" for folder, of in zip((one, other), steps, strict=True)
        )
        raise NotRecorded(f"there is no step that both runs have recorded: {counts}. Set run.record in both")
    compared: list[int] = []
    notes, difference = [], None
    for step in common:
        for folder in (one, other):
            check_origin(folder, recorded_folder(folder, step))
        records = [read_step(recorded_folder(folder, step)) for folder in (one, other)]
        if not compared:
            notes = list(_notes(*records))
        compared.append(step)
        difference = first_difference(*records)
        if difference is not None:
            break
    for folder, of in zip((one, other), steps, strict=True):
        alone = sorted(set(of) - set(common))
        if alone:
            notes.append(f"steps that only {folder.path} has recorded: {len(alone)}, the first is {alone[0]}")
    return Comparison(compared, notes, difference)


def first_difference(one: StepRecord, other: StepRecord) -> Difference | None:
    """Return the first thing that differs between two records of a step; None if they are equal bit for bit."""
    return next(_differences(one, other), None)


def same_layout(one: StepRecord, other: StepRecord) -> bool:
    """Return whether the same ranks have the same parts of tensors, so that fingerprints of ranks can be compared."""
    layouts = [[getattr(record.settings.train, key) for key in LAYOUT] for record in (one, other)]
    return (
        layouts[0] == layouts[1]
        and one.weights.keys() == other.weights.keys()
        and all(
            weights.tensors == other.weights[model].tensors
            and np.array_equal(weights.rank, other.weights[model].rank)
            and np.array_equal(weights.tensor, other.weights[model].tensor)
            for model, weights in one.weights.items()
        )
    )


def _differences(one: StepRecord, other: StepRecord) -> Iterator[Difference]:
    yield from _setting_differences(one, other)
    yield from _weight_differences(one, other, "before", BEFORE)
    yield from _progress_differences(one, other)
    yield from _sample_differences(one, other)
    yield from _reward_differences(one, other)
    yield from _token_differences(one, other)
    first = [key for key in FIRST_METRICS if key in one.metrics or key in other.metrics]
    yield from _metric_differences(one, other, first)
    yield from _weight_differences(one, other, "after", AFTER)
    yield from _metric_differences(one, other, sorted(one.metrics.keys() | other.metrics.keys()))


def _setting_differences(one: StepRecord, other: StepRecord) -> Iterator[Difference]:
    causes = [item for item in _differing_settings(one.settings, other.settings).items() if _is_cause(item[0])]
    if causes:
        yield Difference(one.step, "settings", *causes[0], others=_count(len(causes) - 1, "more setting"))


def _progress_differences(one: StepRecord, other: StepRecord) -> Iterator[Difference]:
    if one.progress != other.progress:
        values = str(dict(one.progress)), str(dict(other.progress))
        yield Difference(one.step, "progress", "the KL coefficient and the guard before the step", values)


def _equal(one: Any, other: Any) -> bool:
    return np.array_equal(one, other) if isinstance(one, np.ndarray) else bool(one == other)


def _elements(field: Any) -> list[Any]:
    return field.array.tolist() if isinstance(field, ExpertChoices) else [*field]


def _sample_differences(one: StepRecord, other: StepRecord) -> Iterator[Difference]:
    these, those = ([*record.samples, *record.greedy] for record in (one, other))
    if len(these) != len(those):
        yield Difference(one.step, "samples", "number of samples", (str(len(these)), str(len(those))))
        return
    for field, name in SAMPLE_FIELDS.items():
        pairs = [(getattr(a, field), getattr(b, field)) for a, b in zip(these, those, strict=True)]
        differing = [number for number, (a, b) in enumerate(pairs) if not _equal(a, b)]
        if differing:
            a, b = pairs[differing[0]]
            place, values = f"the {name} of sample {differing[0]}", (str(a), str(b))
            if not isinstance(a, int):  # a sequence
                a, b = _elements(a), _elements(b)
                values = f"{len(a)} of them", f"{len(b)} of them"
                position = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
                if position is not None:
                    place, values = f"{place} at position {position}", (str(a[position]), str(b[position]))
            yield Difference(one.step, "samples", place, values, others=_count(len(differing) - 1, "more sample"))


def _reward_differences(one: StepRecord, other: StepRecord) -> Iterator[Difference]:
    given = [np.array([sample.reward for sample in record.samples]) for record in (one, other)]
    baselines = (one.baselines, other.baselines) if len(one.baselines) == len(other.baselines) else ()
    for a, b in filter(None, (given, (one.rewards, other.rewards), baselines)):
        differing = _differing(a, b)
        if len(differing):
            values, more = (str(a[differing[0]]), str(b[differing[0]])), _count(len(differing) - 1, "more reward")
            yield Difference(one.step, "rewards", f"sample {differing[0]}", values, others=more)


def _token_differences(one: StepRecord, other: StepRecord) -> Iterator[Difference]:
    by_rank = same_layout(one, other)
    for key, what in TOKEN_VALUES.items():
        a, b = one.token_values.get(key), other.token_values.get(key)
        if a is None and b is None:
            continue
        if a is None or b is None or len(a) != len(b):
            values = tuple("none" if found is None else f"{len(found)} values" for found in (a, b))
            yield Difference(one.step, what, "all samples", (values[0], values[1]))
            continue
        differing = _differing(a, b)
        if len(differing):
            first = int(differing[0])
            ends = np.cumsum([sample.num_loss_tokens for sample in one.samples])
            sample = int(np.searchsorted(ends, first, side="right"))
            token = first - int(ends[sample - 1] if sample else 0)
            where, values = f"sample {sample}, its token {token} of the policy", (str(a[first]), str(b[first]))
            rank = int(one.computed_by[sample]) if by_rank else None
            more = _count(len(differing) - 1, "more value")
            yield Difference(one.step, what, where, values, rank, others=more)


def _metric_differences(one: StepRecord, other: StepRecord, keys: Sequence[str]) -> Iterator[Difference]:
    for key in keys:
        a, b = one.metrics.get(key), other.metrics.get(key)
        if a != b or (key in one.metrics) != (key in other.metrics):
            yield Difference(one.step, key, "the metric", (str(a), str(b)))


def _weight_differences(one: StepRecord, other: StepRecord, when: str, what: str) -> Iterator[Difference]:
    if one.weights.keys() != other.weights.keys():
        yield Difference(one.step, what, "models", (", ".join(one.weights), ", ".join(other.weights)))
        return
    by_rank = same_layout(one, other)
    for model, weights in one.weights.items():
        found = _differing_tensors(weights, other.weights[model], when if by_rank else f"whole_{when}", by_rank)
        if found:
            rank, name, a, b = found[0]
            ranks = {rank for rank, *_ in found}
            more = f"{len({name for _, name, *_ in found})} of {len(weights.tensors)} tensors differ"
            more += f", on {_count(len(ranks), 'rank')}" if by_rank else ", as a whole, in any layout"
            place, values = f"the fingerprint of {name} of the {model}", (_hexadecimal(a), _hexadecimal(b))
            yield Difference(one.step, what, place, values, rank, f"{model}/{name}", more)


def _differing_tensors(
    one: WeightRecord, other: WeightRecord, key: str, by_rank: bool
) -> list[tuple[int | None, str, int | None, int | None]]:
    """Return the rank (None if not by rank), the name and both fingerprints of each tensor that differs."""
    if by_rank:
        a, b = getattr(one, key), getattr(other, key)
        places = np.flatnonzero(a != b).tolist()
        return [(int(one.rank[i]), one.tensors[one.tensor[i]], int(a[i]), int(b[i])) for i in places]
    first, second = (dict(zip(w.tensors, getattr(w, key).tolist(), strict=True)) for w in (one, other))
    names = dict.fromkeys([*first, *second])
    return [(None, name, first.get(name), second.get(name)) for name in names if first.get(name) != second.get(name)]


def _hexadecimal(fingerprint: int | None) -> str:
    return "none" if fingerprint is None else f"{fingerprint:016x}"


def _differing(a: Array, b: Array) -> Array:
    """Return the indices at which two arrays of numbers differ in a bit."""
    kind = np.dtype(f"u{a.itemsize}")
    return np.flatnonzero(a.view(kind) != b.view(kind))


def _notes(one: StepRecord, other: StepRecord) -> Iterator[str]:
    """Yield what may explain different results, or is worth knowing about equal ones."""
    for key, values in _differing_settings(one.settings, other.settings).items():
        if not _is_cause(key) and key not in NO_CAUSES:
            yield f"{key} is {values[0]} and {values[1]}"
    for key in one.environment.keys() | other.environment.keys():
        a, b = one.environment.get(key), other.environment.get(key)
        if a != b:
            yield f"environment: {key} is {a} and {b}"
    if not same_layout(one, other):
        yield "the train layouts differ: results agree up to rounding only, and ranks cannot be compared"


def _is_cause(key: str) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in CAUSES)


def _differing_settings(one: Recipe, other: Recipe) -> dict[str, tuple[str, str]]:
    if one == other:
        return {}
    a, b = (flatten_settings(to_raw(recipe)) for recipe in (one, other))
    return {key: (str(a.get(key)), str(b.get(key))) for key in {**a, **b} if a.get(key) != b.get(key)}


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}" if number else ""
