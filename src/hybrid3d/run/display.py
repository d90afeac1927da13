"""The display of a run's progress, which only rank 0 prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

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
        self._console = console
        self._name = name
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
        """Show the metrics of a step; metrics that it does not measure keep their last value.

        Args:
            steps: total number of steps of the run.
        """
        self._last |= {key: row[key] for key in DISPLAYED_METRICS if key in row}
        values = " · ".join(
            text.format(self._last[key]) for key, text in DISPLAYED_METRICS.items() if key in self._last
        )
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, total=steps, completed=row["step"], values=values)
        else:
            self.print(f"{self._name} step {int(row['step'])} · {values}")
