"""A step's metrics: measured on each rank, reduced over ranks to one row, and the seconds of its phases."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch.distributed as dist

from hybrid3d.distributed import gather_objects
from hybrid3d.run.memory import meter
from hybrid3d.watch.heartbeat import enter_phase


class PhaseTimer:
    """Times the phases of one step, as `time/<phase>`, and the step without its evaluation, as `time/step`.

    Attributes:
        spans: what this rank did, and when it began and ended, in seconds since the epoch.
        peaks: the most bytes of memory that it used meanwhile, by activity.

    Args:
        activities: what this rank does in a phase, where that is not the phase.
    """

    def __init__(self, activities: Mapping[str, str] | None = None) -> None:
        self._activities = activities or {}
        self.spans: list[tuple[str, float, float]] = []
        self.peaks: dict[str, int] = {}
        self._start = time.perf_counter()
        self._phases: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Time a phase; a phase may be entered several times."""
        enter_phase(phase)
        activity = self._activities.get(phase, phase)
        start, clock = time.perf_counter(), time.time()
        meter.start()
        yield
        self.peaks[activity] = max(self.peaks.get(activity, 0), meter.stop())
        self.spans.append((activity, clock, time.time()))
        self._phases[phase] = self._phases.get(phase, 0.0) + time.perf_counter() - start

    def row(self, tokens: int) -> dict[str, float]:
        """Return the seconds of all phases, and the throughput of a step of this many tokens."""
        step = time.perf_counter() - self._start - self._phases.get("eval", 0.0)
        phases = {f"time/{phase}": seconds for phase, seconds in self._phases.items()}
        return {**phases, "time/step": step, "tokens_per_second": tokens / step}


class Stopwatch:
    """Adds up the seconds within its `with` blocks."""

    def __init__(self) -> None:
        self._seconds = self._start = 0.0

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self._seconds += time.perf_counter() - self._start

    def lap(self) -> float:
        """Return the seconds since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


@dataclass
class StepMetrics:
    """One rank's share of a step's metrics, by name.

    Attributes:
        sums: summed over ranks. A mean is a sum too: each rank divides by the number over all ranks.
        maxima: reduced by the maximum over ranks.
        replicated: equal on every rank that has it.
    """

    # An integer stays one between processes, and in the files that it is written to
    sums: dict[str, int | float] = field(default_factory=dict)
    maxima: dict[str, int | float] = field(default_factory=dict)
    replicated: dict[str, int | float] = field(default_factory=dict)

    def add(self, key: str, value: float) -> None:
        """Add `value` to the metric that is summed over ranks."""
        self.sums[key] = self.sums.get(key, 0.0) + value

    def update(self, other: StepMetrics) -> None:
        """Take over another's metrics; where both have one, the other's."""
        self.sums |= other.sums
        self.maxima |= other.maxima
        self.replicated |= other.replicated

    def add_rank(self, other: StepMetrics) -> None:
        """Take in the share of another rank, which does not take part in `reduce`."""
        for key, value in other.sums.items():
            self.add(key, value)
        for key, value in other.maxima.items():
            self.maxima[key] = _larger(self.maxima.get(key, value), value)
        self.replicated |= other.replicated

    def reduce(self, group: dist.ProcessGroup) -> dict[str, float]:
        """Return all metrics reduced over the group's ranks, which may have different ones; the same on every rank."""
        total = StepMetrics()
        for other in gather_objects(self, group):
            total.add_rank(other)
        return total.sums | total.maxima | total.replicated


def _larger(a: float, b: float) -> float:
    """Return the larger number, or NaN where either is (Python's `max` depends on their order)."""
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)
