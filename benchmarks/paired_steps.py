"""Compare seconds a step and tokens per second of this tree with those of another commit's, and print Markdown.

    git worktree add ../before COMMIT
    python benchmarks/paired_steps.py ../before RECIPE [SETTINGS]

Two runs make their steps in turn. Each one's processes are suspended (SIGSTOP) as soon as the row of its step is
written, and go on for the next, so that both have the same machine, whatever else it does from minute to minute.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from hybrid3d.process import descendant_pids

ROOT = Path(__file__).resolve().parent.parent
WARM_UP = 4  # steps of each that are left out: buffers are made, and pages touched for the first time
DRAWS = 4000  # of pairs, for an interval
COLUMNS = {"time/generate": "generation, s", "time/train": "training, s", "tokens_per_second": "tokens per second"}


class SteppedRun:
    """A run of a tree that is suspended between its steps; leaving it ends its processes."""

    def __init__(self, tree: Path, name: str, settings: Sequence[str]):
        self._file, self.seconds = Path("runs") / name / "metrics.jsonl", list[float]()
        command = [sys.executable, "-m", "hybrid3d", "train", *settings, f"name={name}", "run.steps=1000000"]
        paths = os.pathsep.join([str(tree / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": paths}, stdout=sys.stderr)

    def step(self) -> None:
        """Let the run make one step, and note how long it took."""
        done, start = len(self.rows()), time.perf_counter()
        self._signal(signal.SIGCONT)
        while len(self.rows()) == done:
            if self._process.poll() is not None:
                raise SystemExit(f"{self._file.parent} ended with exit code {self._process.returncode}")
            time.sleep(0.001)
        self.seconds.append(time.perf_counter() - start)
        self._signal(signal.SIGSTOP)

    def rows(self) -> list[bytes]:
        return self._file.read_bytes().splitlines() if self._file.exists() else []

    def measured(self) -> dict[str, list[float]]:
        """Return the seconds of each step and what its row says, without the first steps."""
        rows = [json.loads(row) for row in self.rows()[WARM_UP : len(self.seconds)]]
        of_rows = {title: [row[key] for row in rows] for key, title in COLUMNS.items()}
        return {"a step, s": self.seconds[WARM_UP:]} | of_rows

    def _signal(self, number: int) -> None:
        for pid in (self._process.pid, *descendant_pids(self._process.pid)):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def __enter__(self) -> SteppedRun:
        return self

    def __exit__(self, *error: object) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """Return the bounds between which the median lies in 95 % of draws of as many pairs, with replacement."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(DRAWS))
    return medians[DRAWS // 40], medians[-DRAWS // 40]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="pairs of steps (default: 60)")
    parser.add_argument("before", type=Path, metavar="TREE")
    parser.add_argument("settings", nargs="+", metavar="RECIPE SETTINGS")
    given = parser.parse_args()
    with ExitStack() as stack:
        trees = {"before": given.before.resolve(), "now": ROOT}
        runs = list[SteppedRun]()
        for name, tree in trees.items():
            runs.append(stack.enter_context(SteppedRun(tree, f"paired-{name}", given.settings)))
            runs[-1].step()  # alone, as it starts
        for number in range(1, WARM_UP + given.steps):
            for run in runs if number % 2 else reversed(runs):
                run.step()
        before, now = (run.measured() for run in runs)
    print(f"{given.steps} pairs of steps, {os.cpu_count()} CPU cores, {time.strftime('%Y-%m-%d')}; medians.\n")
    print("| | before | now | now / before, median of pairs | in 95 % of draws |\n|---|---|---|---|---|")
    for what in before:
        ratios = [new / old for old, new in zip(before[what], now[what], strict=True)]
        low, high = interval(ratios)
        medians = " | ".join(f"{statistics.median(values):.4g}" for values in (before[what], now[what]))
        print(f"| {what} | {medians} | {statistics.median(ratios):.3f} | {low:.3f} to {high:.3f} |")


if __name__ == "__main__":
    main()
