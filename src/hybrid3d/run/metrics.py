"""A step's metrics: measured on each rank, reduced over ranks to one row, and the seconds and memory of its phases."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from hybrid3d.distributed import gather_objects
from hybrid3d.watch.heartbeat import enter_phase

Span = tuple[str, float, float]
"""An activity, and when it began and ended, in seconds since the epoch by the clock of its node."""

Peaks = Mapping[str, int]
"""The most bytes that a rank has used during each of its activities."""

CLEAR_REFS, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")
RESET_PEAK = "5"  # what proc(5) says to write to CLEAR_REFS


@cache
def measured_device() -> Literal["cuda", "cpu"]:
    """Return whose memory is measured."""
    return "cuda" if torch.cuda.is_available() else "cpu"


class MemoryMeter:
    """Measures the peak memory of this process between `start` and `stop`, in bytes.

    On a GPU these are the bytes that torch has allocated, vLLM's pools included. Torch still counts memory
    that vLLM has freed while it sleeps: `asleep` returns how much that is, and `split` has to be called before it
    changes.

    Without a GPU they are the resident bytes of the process. Where the kernel does not let a process reset its peak,
    only the bytes at `start`, `split` and `stop` are seen.
    """

    def __init__(self) -> None:
        self.asleep: Callable[[], int] = lambda: 0
        self._peak, self._is_running, self._resets = 0, False, True

    def start(self) -> None:
        """Begin to measure; what was measured before is dropped."""
        self._reset()
        self._peak, self._is_running = self._since_reset(), True

    def split(self) -> None:
        """Take in what was measured until now, with the memory that is asleep now."""
        if self._is_running:
            self._peak = max(self._peak, self._since_reset())
            self._reset()

    def stop(self) -> int:
        """Return the most bytes since `start`. After it nothing is measured: stopped again, it returns the same."""
        self.split()
        self._is_running = False
        return self._peak

    def _reset(self) -> None:
        if measured_device() == "cuda":
            if torch.cuda.is_initialized():
                torch.cuda.reset_peak_memory_stats()
        elif self._resets:
            try:
                CLEAR_REFS.write_text(RESET_PEAK, encoding="utf-8")
            except OSError:
                self._resets = False

    def _since_reset(self) -> int:
        if measured_device() == "cuda":
            return max(0, torch.cuda.max_memory_allocated() - self.asleep())
        return _resident_bytes("VmHWM" if self._resets else "VmRSS")


def _resident_bytes(field: str) -> int:
    """Return a field of this process's status, which is in KiB; 0 if there is none."""
    try:
        found = re.search(rf"^{field}:\s+(\d+) kB$", STATUS.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0


meter = MemoryMeter()
"""That of this process: its peak can only be measured once at a time."""


def peak_gb(peaks: Mapping[int, Peaks]) -> float:
    """Return the most memory that one of these ranks used, in 10^9 bytes."""
    return max((nbytes for by_activity in peaks.values() for nbytes in by_activity.values()), default=0) / 1e9


class PhaseTimer:
    """Times the phases of one step, as `time/<phase>`, and the step without its evaluation, as `time/step`.

    Attributes:
        spans: what this rank did.
        peaks: the most bytes of memory that it used meanwhile, by activity.
    """

    def __init__(self, activities: Mapping[str, str] | None = None) -> None:
        """`activities` says what this rank does in a phase, where that is not the phase."""
        self._activities = activities or {}
        self.spans: list[Span] = []
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

    def gather(
        self,
        group: dist.ProcessGroup,
        spans: Mapping[int, Sequence[Span]] | None = None,
        peaks: Mapping[int, Peaks] | None = None,
    ) -> tuple[dict[int, Sequence[Span]], dict[int, Peaks]]:
        """Return spans and peaks of all ranks of the run by rank, on every rank that trains.

        The first rank gives those of the ranks that do not train, if there are any.
        """
        rank = group.rank()
        found = gather_objects(({rank: self.spans, **(spans or {})}, {rank: self.peaks, **(peaks or {})}), group)
        return (
            {rank: those for by_rank, _ in found for rank, those in by_rank.items()},
            {rank: those for _, by_rank in found for rank, those in by_rank.items()},
        )


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

    def update(self, other: StepMetrics) -> None:
        """Take over another's metrics; where both have one, the other's."""
        self.sums |= other.sums
        self.maxima |= other.maxima
        self.replicated |= other.replicated

    def add_rank(self, other: StepMetrics) -> None:
        """Take in the share of another rank, which does not take part in `reduce`."""
        for key, value in other.sums.items():
            self.sums[key] = self.sums.get(key, 0.0) + value
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
