"""Records a run: metrics, samples and events, in the run's folder and on the display, which only rank 0 prints.

What every rank did during a step is a trace, `timeline.json`, that Perfetto and chrome://tracing open, and a picture.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from hybrid3d.config import Recipe
from hybrid3d.generation.evaluation import setting_of
from hybrid3d.generation.samples import Sample
from hybrid3d.rl.data import PromptData
from hybrid3d.run.folder import PEAK, RunFolder, append_rows
from hybrid3d.run.metrics import Peaks, Span, measured_device
from hybrid3d.run.trackers import Trackers

COLORS = {"sync": "C3", "generate": "C0", "train": "C1", "reward": "C2", "wait": "0.85"}
MAX_ROWS = 64  # of the picture of a timeline; of more ranks it shows every n-th
SAMPLES_PER_STEP = 4  # written to samples.jsonl
DISPLAYED_METRICS = {
    "reward/mean": "reward {:.3f}",
    "eval/accuracy": "held-out {:.3f}",
    "eval/preference_accuracy": "held-out pairs {:.3f}",
    "train/loss": "loss {:.4f}",
    "tokens_per_second": "{:.0f} tokens/s",
    "sync/seconds": "sync {:.2f} s",
    "time/step": "step {:.1f} s",
}


class Display:
    """Shows a progress bar with the latest metrics on a terminal, or prints a line per step elsewhere.

    Without a console it shows nothing.
    """

    def __init__(self, name: str, steps: int, console: Console | None):
        self._console, self._name = console, name
        self._last: dict[str, float] = {}
        self._task: TaskID | None = None
        self._progress: Progress | None = None
        if console is not None and console.is_terminal:
            columns: list[Any] = [TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn()]
            columns += [TimeElapsedColumn(), TextColumn("{task.fields[values]}")]
            self._progress = Progress(*columns, console=console)
            self._task = self._progress.add_task(name, total=steps, values="")

    def __enter__(self) -> Display:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def print(self, text: str) -> None:
        """Print a message above the progress bar."""
        if self._console is not None:
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def show_step(self, row: Mapping[str, float], steps: int) -> None:
        """Show the metrics of a step, of so many steps; metrics that it does not measure keep their last value."""
        self._last |= {key: row[key] for key in DISPLAYED_METRICS if key in row}
        values = " · ".join(
            text.format(self._last[key]) for key, text in DISPLAYED_METRICS.items() if key in self._last
        )
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, total=steps, completed=row["step"], values=values)
        else:
            self.print(f"{self._name} step {int(row['step'])} · {values}")


class RunLogger:
    """Writes the records of a run and prints its messages. Only rank 0 does; on other ranks methods do nothing."""

    def __init__(self, folder: RunFolder, rank: int, display: Display, keeps_events: bool = True):
        """With `keeps_events` events are written to the folder, not only printed."""
        self.folder, self._display = folder, display
        self._is_rank_0, self._keeps_events = rank == 0, keeps_events
        self._data_counts: dict[str, float] = {}
        self._trackers: Trackers | None = None
        self._has_timeline = False

    @contextmanager
    def tracking(self, recipe: Recipe) -> Iterator[None]:
        """Send the metrics that are recorded in this context to the recipe's trackers, too."""
        if not (self._is_rank_0 and recipe.tracking):
            yield
            return
        self._trackers, failed = Trackers(recipe, self.folder, self._tracker_failed), True
        try:
            yield
            failed = False
        finally:
            self._trackers.close(failed)

    def _tracker_failed(self, tracker: str, error: Exception) -> None:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        message = f"{tracker} failed and is not used any more, metrics.jsonl has all metrics: {why}"
        self.event("tracker_failed", message, tracker=tracker, why=why)

    def step(self, row: Mapping[str, float], steps: int, samples: Sequence[Sample] = ()) -> None:
        """Record the metrics of a step of a run of so many steps, and a few of its samples."""
        self._display.show_step(row, steps)
        if self._is_rank_0:
            row = {**row, **self._data_counts}
            finite = {key: value if math.isfinite(value) else None for key, value in row.items()}
            append_rows(self.folder.metrics, [finite])
            if self._trackers is not None:
                self._trackers.log(int(row["step"]), {key: value for key, value in row.items() if key != "step"})
            kept = samples[:: max(1, len(samples) // SAMPLES_PER_STEP)][:SAMPLES_PER_STEP]
            rows = (
                {
                    "step": row["step"],
                    "weights": s.weight_version,
                    "versions": s.versions.runs,
                    "prompt": s.prompt,
                    "answer": s.answer,
                    "reward": s.reward,
                    "prompt_tokens": s.prompt_ids.tolist(),
                    "answer_tokens": s.tokens.tolist(),
                }
                for s in kept
            )
            append_rows(self.folder.samples, rows)

    def memory(self, step: int, peaks: Mapping[int, Peaks]) -> None:
        """Record the most memory that a rank used during each activity of a step, except for waiting.

        These numbers are not among the metrics, which two runs of a seed have in common.
        """
        if self._is_rank_0:
            largest: dict[str, int] = {}
            for activity, nbytes in (one for of_rank in peaks.values() for one in of_rank.items()):
                if nbytes and activity != "wait":
                    largest[activity] = max(largest.get(activity, 0), nbytes)
            found = {f"memory/max_{activity}_bytes": nbytes for activity, nbytes in largest.items()}
            append_rows(self.folder.memory, [{"step": step, "device": measured_device(), **found}])

    def timeline(
        self,
        step: int,
        roles: Mapping[str, Sequence[int]],
        spans: Mapping[int, Sequence[Span]],
        peaks: Mapping[int, Peaks],
    ) -> None:
        """Record what each rank did during a step, in place of the step before: see `write_timeline`."""
        if self._is_rank_0:
            write_timeline(self.folder, step, roles, spans, peaks)
            self._has_timeline = True

    def draw_timeline(self) -> None:
        """Draw the timeline that was recorded last, if any was."""
        if self._has_timeline:
            draw_timeline(self.folder)

    def event(self, event: str, message: str = "", **fields: Any) -> None:
        """Write an event with these fields to events.jsonl, and print the message unless it is empty."""
        if self._is_rank_0:
            if self._keeps_events:
                self.folder.add_event(event, **fields)
            if message:
                self._display.print(message)

    def data(self, files: Mapping[str, PromptData]) -> None:
        """Report how many rows of each file are used, as events and in every row of metrics.

        Files are `train`, `eval` and the names in `evaluation.data`.
        """
        for name, data in files.items():
            counts = data.counts
            self._data_counts |= {f"data/{name}_{key}": count for key, count in counts.items()}
            setting = "data.train" if name == "train" else setting_of(name)
            self.event("data", f"{setting} {data}", split=name, file=data.path, **counts)


def write_timeline(
    folder: RunFolder,
    step: int,
    roles: Mapping[str, Sequence[int]],
    by_rank: Mapping[int, Sequence[Span]],
    peaks: Mapping[int, Peaks],
) -> None:
    """Write what each rank did to `timeline.json`, in Chrome's trace format; `roles` has the ranks of each role."""
    spans = [by_rank[rank] for rank in sorted(by_rank)]
    start = min(begin for of_rank in spans for _, begin, _ in of_rank)
    names = [" and ".join(role for role, ranks in roles.items() if rank in ranks) for rank in range(len(spans))]
    events = [
        {"name": name, "pid": names[rank], "tid": rank, "ph": "X"}  # a complete event, in microseconds
        | {"ts": 1e6 * (begin - start), "dur": 1e6 * (end - begin)}
        | ({"args": {PEAK: peaks[rank][name]}} if name in peaks.get(rank, ()) else {})
        for rank, of_rank in enumerate(spans)
        for name, begin, end in of_rank
    ]
    folder.write_timeline({"traceEvents": events, "otherData": {"step": step}})


def draw_timeline(folder: RunFolder) -> None:
    """Draw `timeline.json` to `timeline.png`."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    trace = json.loads(folder.timeline.read_text(encoding="utf-8"))
    names: dict[int, str] = {}
    spans: dict[int, list[Span]] = {}
    for event in trace["traceEvents"]:
        names[event["tid"]] = event["pid"]
        begin, seconds = event["ts"] / 1e6, event["dur"] / 1e6
        spans.setdefault(event["tid"], []).append((event["name"], begin, begin + seconds))
    ranks = list(spans)[:: -(-len(spans) // MAX_ROWS)]
    figure = Figure(figsize=(9, 1.4 + 0.28 * len(ranks)), layout="tight")
    axis = figure.subplots()
    for row, rank in enumerate(ranks):
        for name, begin, end in spans[rank]:
            axis.barh(row, end - begin, left=begin, color=COLORS.get(name, "C7"), edgecolor="white", linewidth=0.5)
    axis.set_yticks(range(len(ranks)), [f"{names[rank]}, rank {rank}" for rank in ranks], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(0, max(end for of_rank in spans.values() for _, _, end in of_rank))
    axis.set_xlabel(f"seconds of step {trace['otherData']['step']}")
    found = sorted({name for of_rank in spans.values() for name, _, _ in of_rank})
    axis.legend(
        handles=[Patch(color=COLORS.get(name, "C7"), label=name) for name in found],
        ncols=len(found),
        fontsize=8,
        loc="lower left",
        bbox_to_anchor=(0, 1),
        frameon=False,
    )
    figure.savefig(folder.timeline_picture, dpi=110)
