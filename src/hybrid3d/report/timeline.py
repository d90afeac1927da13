"""The timeline of one step: what each rank did, and during what it was idle."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from hybrid3d.run.folder import PEAK

ACTIVITIES = ("sync", "eval", "generate", "reward", "train", "record", "wait")
OTHER, IDLE = "other", "wait"
NOBODY = "no rank has an activity"
MAX_BYTES = 2**27  # of the file
MAX_ROLE = 60  # characters of a role's name
MAX_PEAK = 1e18  # bytes

CAUSES = {"eval": "evaluate", "reward": "compute rewards", "record": "record the step", OTHER: "do other work"}


def cause_text(cause: str) -> str:
    """Return why a rank is idle, in words."""
    return f"idle, {cause}" if cause == NOBODY else f"idle while others {CAUSES.get(cause, cause)}"


@dataclass(frozen=True)
class RankSpans:
    """What a rank did: its activities, each with its begin and end in seconds since the step began."""

    rank: int
    role: str
    spans: Sequence[tuple[str, float, float]]
    peaks: Mapping[str, float]  # the most bytes of memory that it used during each of them, if that was measured


@dataclass(frozen=True)
class RoleSeconds:
    """How the ranks of a role spent a step, in seconds per rank on average."""

    role: str
    ranks: int
    busy: dict[str, float]  # by activity
    idle: dict[str, float]  # by what other ranks did meanwhile, or NOBODY


@dataclass(frozen=True)
class Timeline:
    """The timeline of a step."""

    step: int | None
    ranks: Sequence[RankSpans]
    seconds: float  # of the step

    def by_role(self) -> list[RoleSeconds]:
        """Return how the ranks of each role spent the step.

        A rank is idle while it waits and while nothing is recorded of it. The cause is what most of the other ranks do
        at that time.
        """
        idle_causes = _idle_causes(self.ranks, self.seconds)
        found = []
        for role in dict.fromkeys(one.role for one in self.ranks):
            of_role = [one for one in self.ranks if one.role == role]
            busy, causes = defaultdict[str, float](float), defaultdict[str, float](float)
            for one in of_role:
                working = sorted((begin, end) for name, begin, end in one.spans if name != IDLE)
                for name, begin, end in one.spans:
                    if name != IDLE:
                        busy[name] += (end - begin) / len(of_role)
                for begin, end in _gaps(working, self.seconds):
                    for cause, seconds in idle_causes(begin, end):
                        causes[cause] += seconds / len(of_role)
            sorted_causes = dict(sorted(causes.items(), key=lambda one: -one[1]))
            found.append(RoleSeconds(role, len(of_role), dict(busy), sorted_causes))
        return found

    def attributed_fraction(self) -> float:
        """Return the fraction of all ranks' seconds with an activity, or idle for a cause that is known."""
        unknown = sum(one.idle.get(NOBODY, 0.0) * one.ranks for one in self.by_role())
        return 1 - unknown / (self.seconds * len(self.ranks))


def _idle_causes(ranks: Iterable[RankSpans], seconds: float) -> Callable[[float, float], list[tuple[str, float]]]:
    """Return a function of two times: the seconds between them in which each activity was that of most ranks."""
    changes = sorted(
        change
        for one in ranks
        for name, begin, end in one.spans
        if name != IDLE
        for change in ((begin, 1, name), (end, -1, name))
    )
    active, causes = Counter[str](), [NOBODY]
    for _, change, name in changes:
        active[name] += change
        most, count = max(active.items(), key=lambda item: item[1])
        causes.append(most if count > 0 else NOBODY)
    times = [0.0, *(time for time, *_ in changes), seconds]
    lengths = [max(0.0, b - a) for a, b in pairwise(times)]
    totals = {  # the seconds of each activity up to each time
        cause: [0.0, *accumulate(length * (cause == one) for length, one in zip(lengths, causes, strict=True))]
        for cause in set(causes)
    }

    def until(cause: str, time: float) -> float:
        place = min(bisect_right(times, time), len(causes)) - 1
        return totals[cause][place] + (time - times[place]) * (causes[place] == cause)

    def between(begin: float, end: float) -> list[tuple[str, float]]:
        found = ((cause, until(cause, end) - until(cause, begin)) for cause in totals)
        return [(cause, seconds) for cause, seconds in found if seconds > 0]

    return between


def _gaps(spans: Sequence[tuple[float, float]], seconds: float) -> list[tuple[float, float]]:
    """Return what sorted spans leave of the time from 0 to `seconds`."""
    found, until = [], 0.0
    for begin, end in [*spans, (seconds, seconds)]:
        if begin > until:
            found.append((until, begin))
        until = max(until, end)
    return found


def read_timeline(path: Path) -> Timeline | None:
    """Read `timeline.json`; None if there is none, or none that can be read."""
    try:
        with open(path, "rb") as file:
            trace = json.loads(file.read(MAX_BYTES))
        events = [_span(event) for event in trace["traceEvents"]]
        step = trace.get("otherData", {}).get("step")
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None
    by_rank = defaultdict[tuple[int, str], list[tuple[str, float, float]]](list)
    peaks = defaultdict[tuple[int, str], dict[str, float]](dict)
    for rank, role, span, peak in events:
        by_rank[rank, role].append(span)
        peaks[rank, role] |= {} if peak is None else {span[0]: peak}
    seconds = max((end for _, _, (_, _, end), _ in events), default=0.0)
    if not seconds > 0:
        return None
    ranks = [RankSpans(*who, sorted(spans, key=lambda s: s[1]), peaks[who]) for who, spans in sorted(by_rank.items())]
    return Timeline(step if type(step) is int else None, ranks, seconds)


def _span(event: Any) -> tuple[int, str, tuple[str, float, float], float | None]:
    begin, length = 1e-6 * event["ts"], 1e-6 * event["dur"]
    if not (0 <= begin <= begin + length < 1e9):
        raise ValueError("a span that no step has")
    name = event["name"] if event["name"] in ACTIVITIES else OTHER
    peak = event.get("args", {}).get(PEAK)
    if not (peak is None or 0 <= peak < MAX_PEAK):
        raise ValueError("memory that no machine has")
    return int(event["tid"]), str(event["pid"])[:MAX_ROLE], (name, begin, begin + length), peak
