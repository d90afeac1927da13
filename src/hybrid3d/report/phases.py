"""Where the seconds of steps went, from the metrics under `time/`."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hybrid3d.report.run_data import Row, RunRecords

STEP = "time/step"
NOT_OF_THE_STEP = ("time/eval",)  # which time/step excludes
OVERLAPPING = (
    "time/training_busy",
    "time/generation_busy",
    "time/reward_busy",
)  # of a role: within the phases, or beside them

MEANING = {
    "time/sync": "weights to vLLM, offload of the trainer, allocation of the KV cache",
    "time/generate": "generating and scoring samples",
    "time/train": "log-probabilities, advantages and updates",
    "time/record": "fingerprints and files of a recorded step",
    "time/wait": "idle: waiting for the slowest rank at the end of the step",
    "time/eval": "held-out problems; not part of time/step",
}
MEANING_IF_SPLIT = {
    "time/sync": "weights to the ranks that generate",
    "time/generate": "idle: waiting for samples from the ranks that generate",
    "time/eval": "idle: waiting for the evaluation; not part of time/step",
}


@dataclass(frozen=True)
class Attribution:
    """How much of the seconds of all steps is in a phase.

    Attributes:
        fraction: over all steps; None without a step that measured its seconds.
        lowest: the step with the lowest fraction, and that fraction.
        median_seconds: by phase, over the steps that have it.
    """

    fraction: float | None
    lowest: tuple[float, float] | None
    median_seconds: dict[str, float]


def phases_of(rows: Iterable[Row]) -> list[str]:
    """Return the phases that divide a step, in the order of the metrics."""
    found = dict.fromkeys(key for row in rows for key in row if key.startswith("time/"))
    return [key for key in found if key not in (STEP, *NOT_OF_THE_STEP, *OVERLAPPING)]


def attribute(rows: Sequence[Row]) -> Attribution:
    """Attribute the seconds of rank 0, which `time/` measures, to phases."""
    phases = phases_of(rows)
    measured = [(row, step) for row in rows if (step := row.get(STEP)) is not None and step > 0]
    sums = [(row["step"] or 0.0, sum(row.get(key) or 0.0 for key in phases), step) for row, step in measured]
    values = {
        key: [v for row, _ in measured if (v := row.get(key)) is not None] for key in (*phases, "time/eval", STEP)
    }
    return Attribution(
        fraction=sum(inside for _, inside, _ in sums) / sum(step for *_, step in sums) if sums else None,
        lowest=min(((step, inside / seconds) for step, inside, seconds in sums), key=lambda one: one[1], default=None),
        median_seconds={key: statistics.median(found) for key, found in values.items() if found},
    )


def meaning_of(phase: str, run: RunRecords) -> str:
    """Return what rank 0 does in a phase."""
    return (MEANING_IF_SPLIT if run.is_split else {}).get(phase) or MEANING.get(phase, "")
