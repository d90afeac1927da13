"""From what each rank measured to a row of metrics."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from hybrid3d import distributed
from hybrid3d.config import Rollout
from hybrid3d.generation.samples import RolloutBatch, Sample
from hybrid3d.roles.weight_sync import SyncReport
from hybrid3d.run.heartbeat import enter_phase


class Clock:
    """Seconds by phase, as `time/<phase>`, and of the whole step without what only looks at it (`eval`)."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._phases: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        enter_phase(phase)
        start = time.perf_counter()
        yield
        self._phases[phase] = self._phases.get(phase, 0.0) + time.perf_counter() - start

    def row(self, tokens: int) -> dict[str, float]:
        step = time.perf_counter() - self._start - self._phases.get("eval", 0.0)
        phases = {f"time/{phase}": seconds for phase, seconds in self._phases.items()}
        return {**phases, "time/step": step, "tokens_per_second": tokens / step}


@dataclass
class StepMetrics:
    """One rank's part of a step's metrics: values that are added over ranks, and values of which the largest counts.

    Means are added too: of what is divided by all ranks' number already.
    """

    sums: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)

    def add(self, key: str, value: float) -> None:
        """To a sum."""
        self.sums[key] = self.sums.get(key, 0.0) + value

    def add_sync(self, report: SyncReport) -> None:
        self.sums |= {
            "sync/received_bytes": report.received_bytes,
            "sync/lower_bound_bytes": report.lower_bound_bytes,
            "sync/shared_bytes": report.shared_bytes,
        }
        self.maxima |= {
            "sync/seconds": report.seconds,
            "sync/exposed_seconds": report.exposed_seconds,
            "sync/max_staging_bytes": report.staging_bytes,
            "sync/max_finalize_bytes": report.finalize_bytes,
        }

    def over_ranks(self) -> dict[str, float]:
        """Reduced over all ranks, the same on every rank; ranks may name different keys."""
        row: dict[str, float] = {}
        for other in distributed.gather(self):
            for key, value in other.sums.items():
                row[key] = row.get(key, 0) + value
            for key, value in other.maxima.items():
                row[key] = _larger(row.get(key, value), value)
        return row


def _larger(a: float, b: float) -> float:
    """The larger; NaN where either is (Python's `max` depends on their order)."""
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)


def of_samples(drawn: RolloutBatch, samples: Sequence[Sample], rollout: Rollout) -> dict[str, float]:
    """What can be said of a step's samples without a model; and of their turns, where there is an environment."""
    lengths = [len(sample.tokens) for sample in samples]
    turns: dict[str, float] = {}
    if rollout.environment is not None:
        turns["rollout/turns_mean"] = sum(sample.turns for sample in samples) / len(samples)
        others = sum(lengths) - sum(sample.num_loss_tokens for sample in samples)
        turns["rollout/environment_tokens_mean"] = others / len(samples)
    return turns | {
        "reward/mean": sum(sample.reward for sample in samples) / len(samples),
        "rollout/response_tokens_mean": sum(lengths) / len(lengths),
        "rollout/response_tokens_max": max(lengths),
        "rollout/truncated_fraction": sum(length >= rollout.max_new_tokens for length in lengths) / len(lengths),
        "rollout/batches": drawn.batches,
        "rollout/zero_variance_groups": drawn.zero_variance_groups,
        "reward/failures": sum(drawn.failures.values()),
    }
