"""Shows a replay as a table, and comparisons of runs as sentences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from hybrid3d.replay.comparison import Comparison


def print_replay(report: Mapping[str, Any], console: Console) -> None:
    """Print a replay's metrics beside the recorded ones, and what was found.

    Args:
        report: as `ReplayReport.as_json` returns it.
    """
    table = Table("metric", "recorded", "replayed", "difference")
    for key, values in report["metrics"].items():
        a, b = values["recorded"], values["replayed"]
        gap = "equal" if a == b else f"{b - a:.3g}" if a is not None and b is not None else ""
        table.add_row(key, *("" if value is None else f"{value:.9g}" for value in (a, b)), gap)
    for name, gap in report["largest_differences"].items():
        table.add_row(f"tokens: {name}", "", "", "equal" if gap == 0 else f"at most {gap:.3g}")
    console.print(table)
    for line in replay_lines(report):
        console.print(line, soft_wrap=True)


def replay_lines(report: Mapping[str, Any]) -> list[str]:
    """Return what a replay has found, in sentences."""
    steps = f"step {report['step']}"
    if report["start"] < report["step"]:
        steps = f"steps {report['start']} to {report['step']}"
    if report["equal"]:
        return [f"{steps}: equal bit for bit, updated weights included"]
    first = f"first difference: {report['first_difference']['message']} (recorded and replayed)"
    if report["same_layout"]:
        return [f"{steps}: not as recorded", first]
    mean, bound = report["mean_logprob_difference"], report["mean_logprob_bound"]
    verdict = "as recorded, up to rounding in another layout" if report["as_recorded"] else "not as recorded"
    told = f"log-probabilities differ by {mean:.3g} nats on average, and rounding explains up to {bound:g}"
    return [f"{steps}: {verdict}: {told}", first]


def print_comparison(comparison: Comparison, names: tuple[str, str], console: Console) -> None:
    """Print the comparison of two runs of these names."""
    for note in comparison.notes:
        console.print(f"note: {note}", soft_wrap=True)
    steps = comparison.steps
    compared = f"recorded steps that were compared: {len(steps)}, from {steps[0]} to {steps[-1]}"
    if comparison.difference is None:
        console.print(f"{names[0]} and {names[1]} are equal bit for bit: {compared}", soft_wrap=True)
    else:
        message = f"{names[0]} and {names[1]} differ first at {comparison.difference} ({compared})"
        console.print(message, soft_wrap=True)
