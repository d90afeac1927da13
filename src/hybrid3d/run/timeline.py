"""What every rank did during a step: a trace that Perfetto and chrome://tracing open, and a picture."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from hybrid3d.run.folder import RunFolder

if TYPE_CHECKING:  # torch, which is slow to import
    from hybrid3d.run.metrics import Peaks, Span

COLORS = {"sync": "C3", "generate": "C0", "train": "C1", "reward": "C2", "wait": "0.85"}
PEAK = "peak_memory_bytes"
MAX_ROWS = 64  # of the picture; of more ranks it shows every n-th


def write_timeline(
    folder: RunFolder,
    step: int,
    roles: Mapping[str, Sequence[int]],
    by_rank: Mapping[int, Sequence[Span]],
    peaks: Mapping[int, Peaks],
) -> None:
    """Write what each rank did to `timeline.json`, in Chrome's trace format; `roles` has the ranks of each role."""
    spans = [by_rank[rank] for rank in sorted(by_rank)]
    start = min(begin for of_rank in spans for _, begin, _ in of_rank)
    names = [" and ".join(role for role, ranks in roles.items() if rank in ranks) for rank in range(len(spans))]
    events = [
        {"name": name, "pid": names[rank], "tid": rank, "ph": "X"}  # a complete event, in microseconds
        | {"ts": 1e6 * (begin - start), "dur": 1e6 * (end - begin)}
        | ({"args": {PEAK: peaks[rank][name]}} if name in peaks.get(rank, ()) else {})
        for rank, of_rank in enumerate(spans)
        for name, begin, end in of_rank
    ]
    folder.write_timeline({"traceEvents": events, "otherData": {"step": step}})


def draw_timeline(folder: RunFolder) -> None:
    """Draw `timeline.json` to `timeline.png`."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    trace = json.loads(folder.timeline.read_text(encoding="utf-8"))
    names: dict[int, str] = {}
    spans: dict[int, list[Span]] = {}
    for event in trace["traceEvents"]:
        names[event["tid"]] = event["pid"]
        begin, seconds = event["ts"] / 1e6, event["dur"] / 1e6
        spans.setdefault(event["tid"], []).append((event["name"], begin, begin + seconds))
    ranks = list(spans)[:: -(-len(spans) // MAX_ROWS)]
    figure = Figure(figsize=(9, 1.4 + 0.28 * len(ranks)), layout="tight")
    axis = figure.subplots()
    for row, rank in enumerate(ranks):
        for name, begin, end in spans[rank]:
            axis.barh(row, end - begin, left=begin, color=COLORS.get(name, "C7"), edgecolor="white", linewidth=0.5)
    axis.set_yticks(range(len(ranks)), [f"{names[rank]}, rank {rank}" for rank in ranks], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(0, max(end for of_rank in spans.values() for _, _, end in of_rank))
    axis.set_xlabel(f"seconds of step {trace['otherData']['step']}")
    found = sorted({name for of_rank in spans.values() for name, _, _ in of_rank})
    axis.legend(
        handles=[Patch(color=COLORS.get(name, "C7"), label=name) for name in found],
        ncols=len(found),
        fontsize=8,
        loc="lower left",
        bbox_to_anchor=(0, 1),
        frameon=False,
    )
    figure.savefig(folder.timeline_picture, dpi=110)
