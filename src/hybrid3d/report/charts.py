"""Draws curves as SVG paths with axes. Text is not in the SVG, so that it keeps its size on a narrow screen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

SIZE = 1000  # of the drawing's coordinates in both directions; the page stretches it
SCALED_UNITS = ("bytes", "fraction")  # which the numbers on an axis have; other units stand in the chart's title
MAX_MARKS = 100  # events drawn in a chart
MIN_SPREAD = 1e-290  # of the values of a curve; smaller ones cannot be divided into the parts of an axis
FEW_POINTS = 40  # up to which each has a dot
MANY_POINTS, TREND_SPANS = 200, 60
Points = Sequence[tuple[float, float | None]]


@dataclass(frozen=True)
class Curve:
    """One metric of one run: (step, value) pairs, None where the value is not finite."""

    run: int
    key: str
    label: str
    points: Points
    style: tuple[int, int]  # the number of its color, and that of its dashes
    trend: Points  # the means of spans of steps, if there are too many points to see them


@dataclass(frozen=True)
class Limit:
    """A bound on what a chart shows: its value from each of these steps on, None where there is none."""

    label: str
    values: Sequence[tuple[float, float | None]]


@dataclass(frozen=True)
class Tick:
    """A place on an axis, in percent of its length, and its text."""

    place: float
    text: str


@dataclass(frozen=True)
class Line:
    """A curve as drawn: its path, a second one with the dots of single points, and that of its trend."""

    curve: Curve
    path: str
    dots: str
    trend: str


@dataclass(frozen=True)
class Chart:
    """Everything that the page needs to show a chart."""

    title: str
    unit: str
    lines: Sequence[Line]
    limits: Sequence[tuple[str, str]]
    marks: Sequence[Tick]
    x_ticks: Sequence[Tick]
    y_ticks: Sequence[Tick]
    x_range: tuple[float, float]
    summary: str
    notes: Sequence[str]


def draw_chart(
    title: str,
    unit: str,
    steps: tuple[float, float],
    curves: Sequence[Curve],
    limits: Sequence[Limit],
    marks: Sequence[tuple[float, str]],
) -> Chart | None:
    """Draw curves, from the first to the last of `steps`, and events as (step, text); None if there is no point."""
    values = [value for curve in curves for _, value in curve.points if value is not None]
    if not values:
        return None
    x = (steps[0], max(steps[1], steps[0] + 1))
    y, notes = _y_range(values, limits)
    drawn = [(step, text) for step, text in marks if x[0] <= step <= x[1]]
    if len(drawn) > MAX_MARKS:
        notes.append(f"The first {MAX_MARKS} of {len(drawn)} events are drawn")
    shown = [limit for limit in limits if any(v is not None and y[0] <= v <= y[1] for _, v in limit.values)]
    return Chart(
        title=title,
        unit=unit,
        lines=[_line(curve, x, y) for curve in curves],
        limits=[(limit.label, _stairs(limit, x, y)) for limit in shown],
        marks=[Tick(_share(step, x) * 100, text) for step, text in drawn[:MAX_MARKS]],
        x_ticks=[Tick(_share(t, x) * 100, format_number(t)) for t in nice_ticks(*x, 4, whole=True)],
        y_ticks=[Tick(100 - _share(t, y) * 100, _tick_text(t, unit)) for t in nice_ticks(*y, 4)],
        x_range=x,
        summary=f"{title}: " + "; ".join(_summary(curve, unit) for curve in curves if curve.points),
        notes=notes,
    )


def thin(points: Points, limit: int) -> Points:
    """Return at most `limit` of the points: if there are more, the lowest and the highest of each of `limit / 2` spans.

    The points that are kept have their exact values.
    """
    if len(points) <= limit:
        return points
    finite = [(step, value) for step, value in points if value is not None]
    count, kept = max(1, limit // 2), []
    for i in range(count):
        span = finite[len(finite) * i // count : len(finite) * (i + 1) // count]
        if span:
            ends = {span.index(min(span, key=lambda p: p[1])), span.index(max(span, key=lambda p: p[1]))}
            kept += [span[place] for place in sorted(ends)]
    return kept


def trend(points: Points) -> Points:
    """Return the means of `TREND_SPANS` spans of equally many points, or nothing if there are few points."""
    finite = [(step, value) for step, value in points if value is not None]
    if len(finite) < MANY_POINTS:
        return ()
    ends = [len(finite) * i // TREND_SPANS for i in range(TREND_SPANS + 1)]
    spans = [finite[a:b] for a, b in pairwise(ends)]
    return [(fmean(step for step, _ in span), fmean(value for _, value in span)) for span in spans]


def nice_ticks(low: float, high: float, count: int, whole: bool = False) -> list[float]:
    """Return about `count` round numbers between two others."""
    size = 10 ** math.floor(math.log10((high - low) / count))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor * count >= high - low)
    step = max(1.0, step) if whole else step
    first = math.ceil(low / step - 1e-9)
    return [i * step + 0.0 for i in range(first, math.floor(high / step + 1e-9) + 1)]


def format_number(value: float) -> str:
    """Return a number with at most four significant digits, without needless zeros."""
    if value == 0 or 1e-3 <= abs(value) < 1e6:
        return f"{value:,.4g}" if abs(value) < 9_999.5 else f"{value:,.0f}"
    return f"{value:.3g}"


def format_value(value: float, unit: str) -> str:
    """Return a value with its unit; bytes and fractions in the unit that suits their size."""
    if unit == "bytes":
        for name, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
            if abs(value) >= size:
                return f"{format_number(value / size)} {name}"
        return f"{format_number(value)} B"
    if unit == "fraction":
        return f"{format_number(100 * value)} %"
    return f"{format_number(value)} {unit}".rstrip()


def _tick_text(value: float, unit: str) -> str:
    return format_value(value, unit if unit in SCALED_UNITS else "")


def _y_range(values: Sequence[float], limits: Sequence[Limit]) -> tuple[tuple[float, float], list[str]]:
    """Return the range of the y axis, with the bounds that lie near the values, and a note on each that does not."""
    low, high = min(values), max(values)
    notes = []
    for limit in limits:
        for bound in {value for _, value in limit.values if value is not None}:
            reach = max(high - low, abs(high), abs(low)) or 1.0
            if low - reach <= bound <= high + reach:
                low, high = min(low, bound), max(high, bound)
            else:
                notes.append(f"{limit.label} = {format_number(bound)} lies outside of the picture")
    if 0 <= low <= 0.5 * high:
        low = 0.0
    if not high - low > MIN_SPREAD:
        spread = 0.1 * abs(high) if abs(high) > MIN_SPREAD else 1.0
        low, high = (0.0 if low >= 0 else low - spread), high + spread
    spread = 0.06 * (high - low)
    return (low if low == 0 else low - spread, high + spread), notes


def _line(curve: Curve, x: tuple[float, float], y: tuple[float, float]) -> Line:
    runs = _places(curve.points, x, y)
    few = len(curve.points) <= FEW_POINTS
    dots = "".join(f"M{point}h0" for run in runs for point in run if few or len(run) == 1)
    return Line(curve, _path(runs), dots, _path(_places(curve.trend, x, y)))


def _places(points: Points, x: tuple[float, float], y: tuple[float, float]) -> list[list[str]]:
    """Return the coordinates of points, in a list for each run of finite values."""
    runs: list[list[str]] = [[]]
    for step, value in points:
        if value is None:
            runs.append([])
        else:
            runs[-1].append(f"{_share(step, x) * SIZE:.1f} {SIZE - _share(value, y) * SIZE:.1f}")
    return runs


def _path(runs: Sequence[Sequence[str]]) -> str:
    return "".join(f"M{'L'.join(run)}" for run in runs if len(run) > 1)


def _stairs(limit: Limit, x: tuple[float, float], y: tuple[float, float]) -> str:
    """Return the path of a bound: a horizontal line for each of its values."""
    path, following = "", [step for step, _ in limit.values[1:]] + [x[1]]
    for (begin, value), end in zip(limit.values, following, strict=True):
        begin, end = max(begin, x[0]), min(end, x[1])
        if value is not None and end > begin:
            height = SIZE - _share(value, y) * SIZE
            path += f"M{_share(begin, x) * SIZE:.1f} {height:.1f}H{_share(end, x) * SIZE:.1f}"
    return path


def _share(value: float, within: tuple[float, float]) -> float:
    return (value - within[0]) / (within[1] - within[0])


def _summary(curve: Curve, unit: str) -> str:
    finite = [value for _, value in curve.points if value is not None]
    if not finite:
        return f"{curve.label} has no finite value"
    last, low, high = (format_value(value, unit) for value in (finite[-1], min(finite), max(finite)))
    return f"{curve.label} from {low} to {high}, last {last}"
