"""Finds ranks that work more slowly than others that do the same, by the seconds that samples of their stacks count.

Seconds in which a rank waits for others do not count. Compared are ranks with the same part of a phase: the same
pipeline stage in training, the same rank of a replica in generation. Seconds of training count per step, those of
generation per token and per pass of the model: a rank is slow only if it is by both, as requests differ in length.
"""

from __future__ import annotations

import json
import math
import socket
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from hybrid3d.config import Recipe

SLOW = 0.8  # of the median speed
MIN_STEPS = 3  # in a row
MIN_SECONDS = 0.2  # more than the median, a step
DEVIATIONS = 3  # of the number of samples, by which the seconds must differ
KEPT_STEPS = 20
LATE = 2  # steps by which a rank may be behind, or it has been lost, or is not needed for now
TRAIN, GENERATE = "train", "generate"
PHASES = {"train": TRAIN, **dict.fromkeys(("generate", "eval", "score", "advance"), GENERATE)}


@dataclass
class StepWork:
    """What a rank has done in a step: seconds of work by phase; passes and tokens of generation."""

    step: int
    seconds: dict[str, float] = field(default_factory=dict)
    passes: int = 0
    tokens: int = 0

    def units(self, phase: str) -> tuple[float, ...]:
        """Return what the seconds of a phase are compared per."""
        return (self.passes, self.tokens) if phase == GENERATE else (1.0,)


@dataclass
class Work:
    """The last complete steps of a rank, and what it has a part of: parts of a phase with equal names are compared."""

    host: str
    parts: dict[str, str] = field(default_factory=dict)
    steps: Sequence[StepWork] = ()


class WorkRecord:
    """The steps of this rank. The main thread begins steps, and the watchdog's thread counts seconds."""

    def __init__(self) -> None:
        self._parts: dict[str, str] = {}
        self._steps: deque[StepWork] = deque(maxlen=KEPT_STEPS)
        self._current: StepWork | None = None
        self._count_generated: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self._generated = (0, 0)
        self.begun = 0

    def trains(self, recipe: Recipe, rank: int) -> None:
        """Compare this rank with others of its pipeline stage; `rank` is that among those that train."""
        self._parts[TRAIN] = f"pipeline stage {rank // (recipe.train_ranks // recipe.train.pp)}"

    def generates(self, rank: int, count_generated: Callable[[], tuple[int, int]]) -> None:
        """Compare this rank with those of other replicas that have the same rank in theirs.

        `count_generated` returns the passes of the model until now, and the tokens that were generated in them.
        """
        self._parts[GENERATE] = f"rank {rank} of a replica"
        self._count_generated = count_generated

    @property
    def step(self) -> int | None:
        """The step that this rank is in; None before the first one."""
        current = self._current
        return None if current is None else current.step

    def begin_step(self, step: int) -> None:
        """End the step before, and begin this one; the first one is not kept, as things are compiled in it."""
        before, self._generated = self._generated, self._count_generated()
        if self._current is not None and self.begun > 1:
            self._current.passes, self._current.tokens = (a - b for a, b in zip(self._generated, before, strict=True))
            self._steps.append(self._current)
        self._current = StepWork(step)
        self.begun += 1

    def add_seconds(self, phase: str, seconds: float) -> None:
        """Count seconds of work in a phase, as the heartbeat calls it."""
        name, current = PHASES.get(phase), self._current
        if name in self._parts and current is not None:
            current.seconds[name] = round(current.seconds.get(name, 0.0) + seconds, 3)

    def message(self) -> str:
        """Return a `Work` as JSON, which rank 0 compares; made without packages that checks of GPUs lack."""
        return json.dumps(asdict(Work(socket.gethostname(), self._parts, list(self._steps))))


record = WorkRecord()
"""Of this process."""


@dataclass(frozen=True)
class SlowRank:
    """A rank that is slow: its seconds of work a step, and the `typical` ones of the median of the `ranks` compared."""

    rank: int
    host: str
    phase: str
    part: str
    seconds: float
    typical: float
    steps: int
    ranks: int

    def __str__(self) -> str:
        return (
            f"rank {self.rank} on {self.host} is slow: in phase {self.phase} ({self.part}) it worked for "
            f"{self.seconds:.1f} s a step, {self.seconds / self.typical:.1f} times as long as the median of "
            f"{self.ranks} ranks that do the same ({self.typical:.1f} s), over {self.steps} steps"
        )


def find_slow_ranks(works: Mapping[int, Work], sample_seconds: float) -> list[SlowRank]:
    """Return the ranks that are slow in the last steps that all ranks with their part of a phase have completed."""
    peers: dict[tuple[str, str], list[int]] = {}
    for rank, work in works.items():
        for phase, part in work.parts.items():
            peers.setdefault((phase, part), []).append(rank)
    found = []
    for (phase, part), ranks in peers.items():
        of_ranks = {rank: {done.step: done for done in works[rank].steps} for rank in ranks if works[rank].steps}
        newest = max(map(max, of_ranks.values()), default=0)
        ranks = [rank for rank, steps in of_ranks.items() if max(steps) >= newest - LATE]
        if len(ranks) < 2:
            continue
        common = sorted(set.intersection(*(set(of_ranks[rank]) for rank in ranks)))
        table = [_with_typical({rank: of_ranks[rank][step] for rank in ranks}, phase) for step in common]
        for rank in ranks:
            slow = _slowness([of_step[rank] for of_step in table], sample_seconds)
            if slow is not None:
                found.append(SlowRank(rank, works[rank].host, phase, part, *slow, len(ranks)))
    return found


def _with_typical(of_step: Mapping[int, StepWork], phase: str) -> dict[int, tuple[float, float]]:
    """Return the seconds of each rank in a step, and those that the median rank would have needed for the same."""
    seconds = {rank: work.seconds.get(phase, 0.0) for rank, work in of_step.items()}
    units = {rank: work.units(phase) for rank, work in of_step.items()}
    busy = [rank for rank in of_step if min(units[rank]) > 0]
    if len(busy) < 2:
        return {rank: (seconds[rank], math.inf) for rank in of_step}
    per_unit = [{rank: seconds[rank] / units[rank][i] for rank in busy} for i in range(len(units[busy[0]]))]
    middle: list[Callable[[int], float]] = [_median_for(values) for values in per_unit]
    return {
        rank: (seconds[rank], max((of(rank) * units[rank][i] for i, of in enumerate(middle)), default=math.inf))
        for rank in of_step
    }


def _median_for(values: Mapping[int, float]) -> Callable[[int], float]:
    """Return a function of a rank: the median of all ranks, or with two ranks the other one's value."""
    if len(values) == 2:
        return lambda rank: next(value for other, value in values.items() if other != rank)
    median = statistics.median(values.values())
    return lambda rank: median


def _slowness(steps: Sequence[tuple[float, float]], sample_seconds: float) -> tuple[float, float, int] | None:
    """Return seconds and typical seconds a step, and of how many steps, if the rank is slow in the last ones.

    Each of the last steps must be slow. More steps than those are looked at where steps are so short that the seconds,
    which are counted in samples, may differ by chance.
    """
    if any(seconds <= typical / SLOW for seconds, typical in steps[-MIN_STEPS:]):
        return None
    for count in range(MIN_STEPS, len(steps) + 1):
        seconds, typical = (sum(values) for values in zip(*steps[-count:], strict=True))
        chance = DEVIATIONS * math.sqrt(sample_seconds * (seconds + typical))
        if seconds > typical / SLOW and seconds - typical > max(MIN_SECONDS * count, chance):
            return seconds / count, max(typical / count, sample_seconds), count
    return None
