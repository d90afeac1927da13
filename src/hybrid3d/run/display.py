"""What a person sees while a run goes on: one display, on rank 0; every other rank is silent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

SHOWN = {
    "reward/mean": "reward {:.3f}",
    "eval/accuracy": "held-out {:.3f}",
    "train/loss": "loss {:.4f}",
    "tokens_per_second": "{:.0f} tokens/s",
    "sync/seconds": "sync {:.2f} s",
    "time/step": "step {:.1f} s",
}


class Display:
    """A progress bar with the last values on a terminal; a line each step where there is none.

    Made with no console it shows nothing.
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

    def say(self, text: str) -> None:
        if self._console is not None:
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def show(self, row: Mapping[str, float], steps: int) -> None:
        """Show the metrics of a step, of this many steps; what a step does not measure keeps its last value."""
        self._last |= {key: row[key] for key in SHOWN if key in row}
        values = " · ".join(text.format(self._last[key]) for key, text in SHOWN.items() if key in self._last)
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, total=steps, completed=row["step"], values=values)
        else:
            self.say(f"{self._name} step {int(row['step'])} · {values}")
