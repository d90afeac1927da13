"""Makes the page: one HTML file without any reference to another, whatever the texts of the runs contain."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.resources import files
from typing import Any

from hybrid3d import __version__
from hybrid3d.errors import escape_control_characters
from hybrid3d.report import tables
from hybrid3d.report.charts import TREND_SPANS, Points, format_value, thin, trend
from hybrid3d.report.panels import OTHER, draw_sections, event_details
from hybrid3d.report.run_data import Event, Row, RunRecords, SampleSelection, setting_text, shorten
from hybrid3d.report.tables import MEASURED_ON, NOT_OF_THE_STEP, STEP, meaning_of, phases_of
from hybrid3d.report.timeline import ACTIVITIES, RankSpans, Timeline, cause_text
from hybrid3d.report.timeline import OTHER as OTHER_ACTIVITY

MAX_BYTES = 5_000_000  # of the page; the budgets below leave room for the rest of it
METRICS_BYTES = 1_300_000  # of the embedded metrics of all runs
SAMPLES_BYTES = 2_000_000  # of the embedded samples of all runs
BYTES_PER_POINT = 28  # of a metric: its value with 17 digits, and its step
MAX_POINTS = 1000  # of a metric
MAX_METRICS = 200  # of a run
MAX_NAME = 100  # characters of a metric's name
MAX_TIME_ROWS = 300  # steps that can be selected
MAX_EVENTS = 400  # of all runs
MAX_DETAILS = 600  # characters of an event
MAX_SETTINGS = 60_000  # characters of the recipe's settings
MAX_TIMELINE_ROWS, MAX_SPANS, MAX_ROLES = 64, 1500, 20
MAX_PHASES = 30  # metrics under time/ in the table of a step

# fmt: off
WARNINGS = {
    "sync_corrupted", "engine_lost", "sync_failed", "no_engine", "reward_worker_lost", "no_reward_worker",
    "tracker_failed", "out_of_memory", "disk_low", "reward_failed", "engines_disagree", "bound_left", "batch_skipped",
    "kl_fixed", "checkpoint_unwritten", "checkpoint_broken", "control_refused",
}
# fmt: on


def make_page(
    runs: Sequence[RunRecords], samples: Sequence[SampleSelection], plans: Sequence[tables.Plan | None] = (None, None)
) -> str:
    """Return the page of one run or of two side by side.

    Each run has a selection of samples, of `SAMPLES_BYTES` together, and the numbers of `hybrid3d plan`, or None.
    """
    import jinja2

    metrics = [_thinned_metrics(run, len(runs)) for run in runs]
    script, style = _read("page.js"), _read("page.css")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"visible": escape_control_characters, "value": format_value, "cause": cause_text}
    data = {
        "runs": [
            {"name": run.name, "metrics": _as_columns(curves), "time": _time_rows(run)}
            for run, curves in zip(runs, metrics, strict=True)
        ],
        "samples": [{"run": n, **sample} for n, of_run in enumerate(samples) for sample in of_run.shown],
    }
    return environment.from_string(_read("page.html")).render(
        title=" and ".join(run.name for run in runs),
        version=__version__,
        made=_utc(datetime.now(UTC).timestamp()),
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        style=style,
        data=embed_json(data),
        names=[run.name if len(runs) == 1 else f"{'AB'[n]} · {run.name}" for n, run in enumerate(runs)],
        runs=[_run_context(run, len(runs)) for run in runs],
        notes=[_notes(run, curves) for run, curves in zip(runs, metrics, strict=True)],
        samples=samples,
        charts=draw_sections(runs, [_with_trends(run, curves) for run, curves in zip(runs, metrics, strict=True)]),
        other=OTHER,
        overview=tables.overview(runs),
        syncs=tables.sync_table(runs),
        data_rows=tables.data_table(runs),
        differences=tables.differing_settings(*runs) if len(runs) == 2 else None,
        plans=[tables.plan_table(run, plan) if plan else None for run, plan in zip(runs, plans, strict=False)],
        memory=[_memory_context(run, plan) for run, plan in zip(runs, plans, strict=False)],
    )


def embed_json(data: Any) -> str:
    """Return JSON that can stand in a script element: ASCII, and without a character that HTML could interpret."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for char in "<>&":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text


def _read(name: str) -> str:
    return (files("hybrid3d.report") / name).read_text(encoding="utf-8")


def _thinned_metrics(run: RunRecords, number_of_runs: int) -> dict[str, Points]:
    """Return the points of each metric; where that is too much for the page, the lowest and highest of equal spans."""
    keys = list(dict.fromkeys(key for row in run.rows for key in row if key != "step" and len(key) <= MAX_NAME))
    keys = keys[:MAX_METRICS]
    limit = METRICS_BYTES // number_of_runs // (BYTES_PER_POINT * max(1, len(keys)))
    return {key: thin(_points(run.rows, key), min(MAX_POINTS, limit)) for key in keys}


def _with_trends(run: RunRecords, curves: Mapping[str, Points]) -> dict[str, tuple[Points, Points]]:
    return {key: (points, trend(_points(run.rows, key))) for key, points in curves.items()}


def _points(rows: Sequence[Row], key: str) -> Points:
    return [(step, row[key]) for row in rows if key in row and (step := row["step"]) is not None]


def _as_columns(curves: Mapping[str, Points]) -> dict[str, dict[str, list[float | None]]]:
    return {
        key: {"steps": [step for step, _ in points], "values": [value for _, value in points]}
        for key, points in curves.items()
    }


def _time_rows(run: RunRecords) -> list[Row]:
    """Return the seconds of steps, evenly over the run, with the last step and that of the timeline."""
    rows = [row for row in run.rows if row.get(STEP)]
    every = -(-len(rows) // MAX_TIME_ROWS) or 1
    recorded = None if run.timeline is None else run.timeline.step
    kept = [row for n, row in enumerate(rows) if n % every == 0 or n == len(rows) - 1 or row["step"] == recorded]
    keys = [*dict.fromkeys(key for row in rows for key in row if key.startswith("time/") and len(key) <= MAX_NAME)]
    return [{key: row[key] for key in ("step", STEP, *keys[:MAX_PHASES]) if key in row} for row in kept]


def _run_context(run: RunRecords, number_of_runs: int) -> dict[str, Any]:
    rows = _time_rows(run)
    recorded = None if run.timeline is None else run.timeline.step
    selected = next((row for row in rows if row["step"] == recorded), rows[-1] if rows else None)
    shown = max(1, MAX_EVENTS // number_of_runs)
    return {
        "run": run,
        "settings": shorten("\n".join(f"{k}: {setting_text(v)}" for k, v in run.settings.items()), MAX_SETTINGS, 0),
        "steps": [row["step"] for row in rows],
        "selected": selected,
        "phases": [(phase, meaning_of(phase, run)) for phase in phases_of(rows)],
        "medians": tables.median_seconds(run.rows),
        "not_of_the_step": [
            (phase, meaning_of(phase, run)) for phase in NOT_OF_THE_STEP if any(phase in r for r in rows)
        ],
        "attribution": tables.attribution_text(run),
        "timeline": None if run.timeline is None else _timeline_context(run.timeline),
        "events": [_event_context(event) for event in run.events[-shown:]],
    }


def _timeline_context(timeline: Timeline) -> dict[str, Any]:
    shown: list[dict[str, Any]] = []
    left = MAX_SPANS
    for one in _shown_ranks(timeline):
        spans: list[dict[str, Any]] = [
            {
                "left": 100 * begin / timeline.seconds,
                "width": 100 * (end - begin) / timeline.seconds,
                "kind": name,
                "text": f"rank {one.rank}: {name}, {end - begin:.3f} s, from {begin:.3f} s to {end:.3f} s",
            }
            for name, begin, end in one.spans[:left]
        ]
        left -= len(spans)
        shown.append({"name": f"rank {one.rank} · {one.role}", "spans": spans})
    return {
        "timeline": timeline,
        "rows": shown,
        "kinds": [
            name
            for name in (*ACTIVITIES, OTHER_ACTIVITY)
            if any(s["kind"] == name for row in shown for s in row["spans"])
        ],
        "roles": timeline.by_role()[:MAX_ROLES],
        "attributed": timeline.attributed_fraction(),
    }


def _memory_context(run: RunRecords, plan: tables.Plan | None) -> dict[str, Any]:
    kinds = [kind for kind, shown in (("planned", plan), ("measured", run.memory_device)) if shown]
    gpu = f"fullest of GPUs of {format_value(plan['memory']['gpu'], 'bytes')}" if plan else "fullest rank"
    ranks = _shown_ranks(run.timeline) if run.timeline else []
    columns, rows = tables.memory_table(run, plan)
    rank_columns, rank_rows = tables.rank_memory_table(ranks)
    return {
        "caption": f"{' and '.join(kinds).capitalize()} memory by phase, {gpu}",
        "columns": columns,
        "rows": rows,
        "note": MEASURED_ON[run.memory_device],
        "step": run.timeline.step if run.timeline else None,
        "rank_columns": rank_columns,
        "ranks": rank_rows,
        "left_out": len(run.timeline.ranks) - len(ranks) if run.timeline else 0,
    }


def _shown_ranks(timeline: Timeline) -> Sequence[RankSpans]:
    return timeline.ranks[:: -(-len(timeline.ranks) // MAX_TIMELINE_ROWS)]


def _event_context(event: Event) -> dict[str, Any]:
    step = event.get("step")
    return {
        "time": "" if event["time"] is None else _utc(event["time"]),
        "step": "" if step is None else shorten(str(step), 20, 0),
        "event": shorten(event["event"], 60, 0),
        "details": shorten(event_details(event), MAX_DETAILS, 0),
        "warning": event["event"] in WARNINGS,
    }


def _notes(run: RunRecords, curves: Mapping[str, Points]) -> list[str]:
    """Return what the page does not show of a run."""
    found = [f"{count} line(s) of {name} could not be read, and are left out" for name, count in run.unreadable.items()]
    keys = {key for row in run.rows for key in row} - {"step"}
    if len(keys) > len(curves):
        found.append(f"{len(curves)} of {len(keys)} metrics are shown")
    most = max((sum(key in row for row in run.rows) for key in curves), default=0)
    drawn = max((len(points) for points in curves.values()), default=0)
    if drawn < most:
        found.append(
            f"curves show {drawn:,} of {most:,} steps: the lowest and the highest value of equal spans of steps, "
            "with their exact values"
        )
    if any(trend(points) for points in curves.values()):
        found.append(f"bold curves are means of {TREND_SPANS} equal spans of steps")
    return found


def _utc(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return ""
