"""The tables of a report: the state of the runs, their syncs and memory, plans against measurements, and settings."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybrid3d.report.charts import format_number, format_value
from hybrid3d.report.run_data import MEMORY, Row, RunRecords, setting_text
from hybrid3d.report.timeline import RankSpans

NONE = "–"
Plan = Mapping[str, Any]
"""The numbers of `hybrid3d plan --json`."""

STEP = "time/step"
NOT_OF_THE_STEP = ("time/eval",)  # which time/step excludes
OVERLAPPING = ("time/training_busy", "time/generation_busy", "time/reward_busy")  # of a role: in phases, or beside them

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

PHASES = {
    "train": "Training",
    "sync": "Sync",
    "generate": "Generation",
    "eval": "Evaluation",
    "reward": "Rewards",
    "record": "Recording",
}
MEMORY_OF_PHASES = tuple(f"{MEMORY}max_{phase}_bytes" for phase in PHASES)
NO_PARTS = ("gpu", *PHASES, "kv_cache_tokens")  # of a plan's memory

MEASURED_ON = {
    None: "The run has not recorded its memory by phase.",
    "cpu": (
        "The run used no GPU. What is measured is the resident memory of a rank's process, with both engines and all "
        "libraries; the plan is of the memory of a GPU, so that the two cannot be compared."
    ),
    "cuda": (
        "What is measured is what torch had allocated on the GPU, vLLM's memory included, without what vLLM had freed "
        "while it slept. CUDA, NCCL and gaps between torch's tensors take memory in addition."
    ),
}


@dataclass(frozen=True)
class TableRow:
    """A row: its label, a cell for each column, and a note on it."""

    label: str
    cells: Sequence[str]
    note: str = ""


def overview(runs: Sequence[RunRecords]) -> list[TableRow]:
    """Return the most important facts about each run."""

    def last(key: str, unit: str = "") -> Callable[[RunRecords], str]:
        return lambda run: _at(run.metric(key)[-1:], unit)

    def best(key: str, unit: str = "") -> Callable[[RunRecords], str]:
        return lambda run: _at(sorted(run.metric(key), key=lambda one: one[1])[-1:], unit)

    def median(key: str, unit: str) -> Callable[[RunRecords], str]:
        return lambda run: _median([value for _, value in run.metric(key)], unit)

    facts: list[tuple[str, Callable[[RunRecords], str]]] = [
        ("State", lambda run: run.state),
        ("Steps", _progress),
        ("Algorithm", lambda run: setting_text(run.settings.get("algorithm.name"))),
        ("Training layout", lambda run: _layout(run, "train", ("tp", "pp", "vpp", "ep", "etp", "cp", "dp"))),
        ("Rollout layout", _rollout_layout),
        ("Reward, last", last("reward/mean")),
        ("Held-out accuracy, last", last("eval/accuracy", "fraction")),
        ("Held-out accuracy, best", best("eval/accuracy", "fraction")),
        ("Loss, last", last("train/loss")),
        ("Seconds of a step, median", median("time/step", "s")),
        ("Throughput, median", median("tokens_per_second", "tokens/s")),
    ]
    rows = [TableRow(label, [fact(run) for run in runs]) for label, fact in facts]
    return [row for row in rows if any(cell not in (NONE, "null") for cell in row.cells)]


def sync_table(runs: Sequence[RunRecords]) -> list[TableRow]:
    """Return what the syncs of each run moved, how long they took, and how they were verified."""
    rows = [row for run in runs for row in run.rows]
    if not any("sync/received_bytes" in row for row in rows):
        return []

    def of(key: str, unit: str, dense: float | None = None) -> list[str]:
        return [_median(_of_syncs(run, key, dense), unit) for run in runs]

    return [
        TableRow("Syncs", [str(len(run.metric("sync/received_bytes"))) for run in runs]),
        TableRow(
            "of them of all weights (dense)", [str(sum(v > 0 for _, v in run.metric("sync/dense"))) for run in runs]
        ),
        TableRow("Bytes of a dense sync, median", of("sync/received_bytes", "bytes", 1)),
        TableRow(
            "Lower bound, median",
            of("sync/lower_bound_bytes", "bytes", 1),
            "wanted and not held, counted independently",
        ),
        TableRow("Bytes of a sync of changed elements, median", of("sync/delta_bytes", "bytes", 0)),
        TableRow("of the bytes of a dense sync", [_delta_share(run) for run in runs]),
        TableRow("Seconds of a sync, median", of("sync/seconds", "s")),
        TableRow("of them exposed, median", of("sync/exposed_seconds", "s"), "in which the rank did nothing else"),
        TableRow("Exposed share of a step, median", [_exposed_share(run) for run in runs]),
        TableRow("Verified by checksums", [setting_text(run.settings.get("sync.verify")) for run in runs]),
        TableRow(
            "Corrupted syncs, repeated",
            [str(sum(event["event"] == "sync_corrupted" for event in run.events)) for run in runs],
        ),
    ]


def plan_table(run: RunRecords, plan: Plan) -> list[TableRow]:
    """Return the plan of a run's sync against its first sync of all weights, in bytes and seconds."""
    dense = next((row for row in run.rows if row.get("sync/dense")), {})
    bytes_of_sync = [
        ("Received by all ranks", "received_bytes", ""),
        ("Lower bound", "lower_bound_bytes", ""),
        ("Between nodes", "network_bytes", ""),
        ("Lower bound between nodes", "network_bound_bytes", ""),
        ("Staging, fullest rank", "max_staging_bytes", ""),
        ("Finalization, fullest rank", "max_finalize_bytes", "planned as an upper bound"),
    ]
    kind = setting_text(run.settings.get("machine.kind"))
    seconds = [format_value(plan["seconds"]["sync"], "s"), _median(_of_syncs(run, "sync/seconds", 1), "s")]
    return [
        *(
            TableRow(label, [_exact_bytes(plan.get(key)), _exact_bytes(dense.get(f"sync/{key}"))], note)
            for label, key, note in bytes_of_sync
        ),
        TableRow("Seconds of a dense sync", seconds, f"predicted for machine.kind={kind}; measured: the median"),
    ]


def memory_table(run: RunRecords, plan: Plan | None) -> tuple[list[str], list[TableRow]]:
    """Return columns and rows of the fullest rank's memory by phase, planned and measured, and of a plan's parts."""
    planned = plan["memory"] if plan else {}
    peaks = {phase: run.metric(key) for phase, key in zip(PHASES, MEMORY_OF_PHASES, strict=True)}
    most = {phase: max(found, key=lambda one: one[1]) for phase, found in peaks.items() if found}
    measured = {phase: nbytes for phase, (_, nbytes) in most.items()}
    columns: dict[str, Callable[[str], str]] = {}
    if plan:
        columns["Plan"] = lambda key: _bytes(planned.get(key))
        columns["of a GPU"] = lambda key: _fraction(planned.get(key), planned["gpu"])
    if run.memory_device:
        columns["Measured"] = lambda key: _bytes(measured.get(key))
    if plan and run.memory_device == "cuda":
        columns["of the plan"] = lambda key: _fraction(measured.get(key) or None, planned.get(key))
    rows = {phase: label for phase, label in PHASES.items() if phase in most or phase in planned}
    rows |= {key: f"{key.removeprefix('max_').replace('_', ' ')}, at most" for key in planned if key not in NO_PARTS}
    return list(columns), [
        TableRow(
            label,
            [cell(key) for cell in columns.values()],
            f"measured: the most, at step {most[key][0]:g}" if key in most else "",
        )
        for key, label in rows.items()
    ]


def rank_memory_table(ranks: Sequence[RankSpans]) -> tuple[list[str], list[TableRow]]:
    """Return the columns and rows of a table with the most memory that each rank has used in a step, by phase."""
    found = [phase for phase in PHASES if any(phase in one.peaks for one in ranks)]
    return [PHASES[phase] for phase in found], [
        TableRow(f"rank {one.rank} · {one.role}", [_bytes(one.peaks.get(phase)) for phase in found])
        for one in (ranks if found else ())
    ]


def _bytes(number: float | None) -> str:
    return NONE if number is None else format_value(number, "bytes")


def _fraction(part: float | None, whole: float | None) -> str:
    return NONE if part is None or not whole else format_value(part / whole, "fraction")


def differing_settings(a: RunRecords, b: RunRecords) -> list[TableRow]:
    """Return the settings in which two runs differ."""
    keys = dict.fromkeys((*a.settings, *b.settings))
    values = {key: [setting_text(run.settings[key]) if key in run.settings else NONE for run in (a, b)] for key in keys}
    return [TableRow(key, cells) for key, cells in values.items() if cells[0] != cells[1]]


def data_table(runs: Sequence[RunRecords]) -> list[TableRow]:
    """Return the counts of the data's rows, which are the same at every step."""
    keys = dict.fromkeys(key for run in runs for row in run.rows[-1:] for key in row if key.startswith("data/"))
    return [TableRow(key, [_median([v for _, v in run.metric(key)[-1:]], "") for run in runs]) for key in keys]


def attribution_text(run: RunRecords) -> str:
    """Return a sentence about how much of rank 0's seconds, which `time/` measures, is attributed to phases."""
    phases = phases_of(run.rows)
    sums = [(sum(row.get(key) or 0.0 for key in phases), step, row["step"]) for row, step in _measured_steps(run.rows)]
    if not sums:
        return "The run has measured no step yet."
    fraction = sum(inside for inside, _, _ in sums) / sum(seconds for _, seconds, _ in sums)
    lowest, step = min((inside / seconds, step or 0.0) for inside, seconds, step in sums)
    return (
        f"{100 * fraction:.2f} % of the seconds of all steps are attributed to a phase; "
        f"of step {step:g}, the least attributed, {100 * lowest:.2f} %."
    )


def median_seconds(rows: Sequence[Row]) -> dict[str, float]:
    """Return the seconds of each phase and of the step, as medians over the steps that have it."""
    measured = [row for row, _ in _measured_steps(rows)]
    keys = (*phases_of(rows), *NOT_OF_THE_STEP, STEP)
    values = {key: [value for row in measured if (value := row.get(key)) is not None] for key in keys}
    return {key: statistics.median(found) for key, found in values.items() if found}


def _measured_steps(rows: Iterable[Row]) -> list[tuple[Row, float]]:
    return [(row, seconds) for row in rows if (seconds := row.get(STEP)) is not None and seconds > 0]


def _of_syncs(run: RunRecords, key: str, dense: float | None) -> list[float]:
    """Return a metric at the syncs that were dense (1), or not (0), or at all (None)."""
    rows = [row for row in run.rows if dense in (None, row.get("sync/dense"))]
    return [value for row in rows if (value := row.get(key)) is not None]


def _delta_share(run: RunRecords) -> str:
    both = _of_syncs(run, "sync/delta_bytes", 0), _of_syncs(run, "sync/received_bytes", 1)
    changed, dense = (statistics.median(values) if values else None for values in both)
    return _fraction(changed, dense)


def _exposed_share(run: RunRecords) -> str:
    pairs = [(row.get("sync/exposed_seconds"), row.get("time/step")) for row in run.rows]
    return _median([sync / step for sync, step in pairs if sync is not None and step], "fraction")


def _progress(run: RunRecords) -> str:
    last = run.rows[-1]["step"] if run.rows else None
    done = "none recorded yet" if last is None else f"{last:g}"
    return done if run.steps is None else f"{done} of {run.steps}"


def _layout(run: RunRecords, section: str, axes: Sequence[str]) -> str:
    sizes = [(axis, run.settings.get(f"{section}.{axis}")) for axis in axes]
    return (
        " ".join(f"{axis}={size}" for axis, size in sizes if type(size) is int and (size > 1 or axis == "tp")) or NONE
    )


def _rollout_layout(run: RunRecords) -> str:
    if "rollout.tp" not in run.settings:
        return NONE
    where = f", {run.settings['roles.generation.ranks']} ranks of their own" if run.is_split else ", on the same ranks"
    return _layout(run, "rollout", ("tp",)) + where


def _at(points: Sequence[tuple[float, float]], unit: str) -> str:
    return f"{format_value(points[0][1], unit)} (step {points[0][0]:g})" if points else NONE


def _median(values: Sequence[float], unit: str) -> str:
    return format_value(statistics.median(values), unit) if values else NONE


def _exact_bytes(number: float | None) -> str:
    if number is None:
        return NONE
    return f"{format_value(number, 'bytes')} ({number:,.0f})" if number >= 1000 else f"{format_number(number)} B"


def phases_of(rows: Iterable[Row]) -> list[str]:
    """Return the phases that divide a step, in the order of the metrics."""
    found = dict.fromkeys(key for row in rows for key in row if key.startswith("time/"))
    return [key for key in found if key not in (STEP, *NOT_OF_THE_STEP, *OVERLAPPING)]


def meaning_of(phase: str, run: RunRecords) -> str:
    """Return what rank 0 does in a phase."""
    return (MEANING_IF_SPLIT if run.is_split else {}).get(phase) or MEANING.get(phase, "")
