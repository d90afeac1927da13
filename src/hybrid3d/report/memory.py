"""The memory of a run by phase: the plan against what was measured, and what each rank has used in a step."""

from __future__ import annotations

from collections.abc import Sequence

from hybrid3d.report.charts import format_value
from hybrid3d.report.run_data import MEMORY, RunRecords
from hybrid3d.report.tables import NONE, Plan, TableRow
from hybrid3d.report.timeline import RankSpans

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


def memory_columns(run: RunRecords, plan: Plan | None) -> list[str]:
    """Return the names of the columns of `memory_table`."""
    planned = ["Plan", "of a GPU"] if plan else []
    measured = ["Measured"] if run.memory_device else []
    return [*planned, *measured, *(["of the plan"] if plan and run.memory_device == "cuda" else [])]


def memory_table(run: RunRecords, plan: Plan | None) -> list[TableRow]:
    """Return the memory of the fullest rank by phase, planned and measured, and what the plan consists of."""
    planned = plan["memory"] if plan else {}
    peaks = {phase: run.metric(key) for phase, key in zip(PHASES, MEMORY_OF_PHASES, strict=True)}
    most = {phase: max(found, key=lambda one: one[1]) for phase, found in peaks.items() if found}
    rows = [(phase, label) for phase, label in PHASES.items() if phase in most or phase in planned]
    parts = {key: f"{key.removeprefix('max_').replace('_', ' ')}, at most" for key in planned if key not in NO_PARTS}
    return [
        TableRow(
            label,
            _cells(run, planned.get(key), most[key][1] if key in most else None, planned.get("gpu")),
            f"measured: the most, at step {most[key][0]:g}" if key in most else "",
        )
        for key, label in (*rows, *parts.items())
    ]


def _cells(run: RunRecords, planned: float | None, measured: float | None, gpu: float | None) -> list[str]:
    cells = []
    if gpu:
        cells += [NONE, NONE] if planned is None else [_bytes(planned), format_value(planned / gpu, "fraction")]
    if run.memory_device:
        cells.append(NONE if measured is None else _bytes(measured))
    if gpu and run.memory_device == "cuda":
        cells.append(format_value(measured / planned, "fraction") if measured and planned else NONE)
    return cells


def _bytes(number: float) -> str:
    return format_value(number, "bytes")


def rank_memory_table(ranks: Sequence[RankSpans]) -> tuple[list[str], list[TableRow]]:
    """Return the columns and rows of a table with the most memory that each rank has used in a step, by phase."""
    found = [phase for phase in PHASES if any(phase in one.peaks for one in ranks)]
    rows = [
        TableRow(
            f"rank {one.rank} · {one.role}",
            [_bytes(one.peaks[phase]) if phase in one.peaks else NONE for phase in found],
        )
        for one in ranks
    ]
    return [PHASES[phase] for phase in found], rows if found else []
