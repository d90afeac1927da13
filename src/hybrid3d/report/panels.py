"""Which metrics share a chart, under which title, with which bounds and events drawn in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hybrid3d.report.charts import Chart, Curve, Limit, Points, draw_chart
from hybrid3d.report.run_data import Event, RunRecords, is_number
from hybrid3d.report.tables import MEMORY_OF_PHASES
from hybrid3d.run.bounds import BOUNDS

MAX_KEYS_OF_TWO_RUNS = 3  # in one chart; more curves could not be told apart


Panels = Mapping[str, Sequence[str]]
"""By title, the metrics that share a chart."""

SECTIONS: Mapping[str, Panels] = {
    "learned": {
        "Reward": ("reward/mean",),
        "Held-out problems": ("eval/accuracy", "eval/reward"),
        "Preference pairs ranked right": ("preference/accuracy", "eval/preference_accuracy"),
        "Margin of preference pairs": ("preference/margin", "eval/preference_margin"),
        "Rewards of preference pairs": ("preference/chosen_reward", "preference/rejected_reward"),
        "Loss": ("train/loss",),
        "KL to the reference": ("train/kl", "train/answer_kl"),
        "KL coefficient": ("train/kl_coef",),
        "Entropy": ("train/entropy",),
        "Gradient norm before clipping": ("train/grad_norm", "critic/grad_norm"),
        "KL of an update": ("train/approx_kl",),
        "Clipped tokens": ("train/clip_fraction", "train/dual_clip_fraction", "critic/value_clip_fraction"),
        "Probability ratio": ("train/ratio",),
        "Learning rate": ("train/lr", "critic/lr"),
        "Critic's loss": ("critic/loss", "critic/value_error"),
        "Critic's values": ("critic/value",),
        "Length of answers": ("rollout/response_tokens_mean", "rollout/response_tokens_max"),
        "Truncated answers": ("rollout/truncated_fraction",),
        "Groups whose rewards are all equal": ("rollout/zero_variance_groups",),
    },
    "time": {
        "Seconds of a step": ("time/step", "time/sync", "time/generate", "time/train", "time/wait"),
        "Throughput": ("tokens_per_second",),
        "Busy seconds of a role": ("time/training_busy", "time/generation_busy", "time/reward_busy"),
        "Seconds of an evaluation": ("time/eval",),
    },
    "sync": {
        "Bytes of a sync, all ranks": ("sync/received_bytes", "sync/lower_bound_bytes"),
        "Bytes between nodes": ("sync/network_bytes", "sync/network_bound_bytes"),
        "Seconds of a sync": ("sync/seconds", "sync/exposed_seconds"),
        "Bytes of a sync of changed elements": ("sync/delta_bytes", "sync/delta_bound_bytes"),
        "Weights whose bits have changed": ("sync/changed_fraction",),
    },
    "memory": {
        "Peak memory by phase, fullest rank": MEMORY_OF_PHASES,
        "Buffers of a sync, fullest rank": ("sync/max_staging_bytes", "sync/max_finalize_bytes"),
    },
    "mismatch": {
        "Difference of a token's log-probability, mean": ("mismatch/logprob_abs_mean",),
        "Difference of a token's log-probability, its distribution": (
            "mismatch/logprob_abs_p50",
            "mismatch/logprob_abs_p99",
            "mismatch/logprob_abs_max",
        ),
        "Difference of a token's log-probability, mean by its position: quarters of the longest answer": tuple(
            f"mismatch/logprob_abs_quarter_{quarter}" for quarter in range(1, 5)
        ),
        "KL of the rollout's to the trainer's probabilities": ("mismatch/kl",),
        "Factor of the correction": ("mismatch/weight",),
    },
}
OTHER = "other"  # the section of all metrics that no panel names
TABLED = "data/"  # metrics that are the same at every step

FRACTIONS = ("fraction", "accuracy")
NATS = ("kl", "entropy", "logprob_abs_")

# The metrics in whose charts an event is drawn; those of `bound_left` are in the event itself
DRAWN_EVENTS = {
    "batch_skipped": ("train/grad_norm", "critic/grad_norm"),
    "kl_fixed": ("train/kl", "train/answer_kl", "train/kl_coef"),
    "engines_disagree": ("mismatch/logprob_abs_mean", "mismatch/logprob_abs_p50"),
    "setting_changed": ("reward/mean", "train/lr", "train/kl_coef"),
    "out_of_memory": ("time/step", "reward/mean"),
    "resume": ("reward/mean", "time/step"),
    "sync_corrupted": ("sync/received_bytes", "sync/seconds"),
    "reward_failed": ("reward/mean",),
}


def unit_of(key: str) -> str:
    """Return the unit of a metric; `fraction` if it is shown in percent."""
    name = key.rpartition("/")[2]
    if name.endswith("bytes"):
        return "bytes"
    if key == "tokens_per_second":
        return "tokens/s"
    if key.startswith("time/") or name.endswith("seconds"):
        return "s"
    if any(part in name for part in FRACTIONS):
        return "fraction"
    if "tokens" in name:
        return "tokens"
    return "nats" if any(part in name for part in NATS) and name != "kl_coef" else ""


Metrics = Sequence[Mapping[str, tuple[Points, Points]]]
"""For each run, by metric: its points, and its trend if there are many."""


def draw_sections(runs: Sequence[RunRecords], metrics: Metrics) -> dict[str, list[Chart]]:
    """Draw all metrics of the runs, by section."""
    named = {key for panels in SECTIONS.values() for keys in panels.values() for key in keys}
    others = dict.fromkeys(key for of_run in metrics for key in of_run if key not in named)
    rest = {key: (key,) for key in others if not key.startswith(TABLED)}
    return {
        section: [chart for title, keys in panels.items() for chart in _charts(title, keys, runs, metrics)]
        for section, panels in {**SECTIONS, OTHER: rest}.items()
    }


def _charts(title: str, named: Sequence[str], runs: Sequence[RunRecords], metrics: Metrics) -> list[Chart]:
    keys = [key for key in named if any(key in of_run for of_run in metrics)]
    if len(runs) > 1 and len(keys) > MAX_KEYS_OF_TWO_RUNS:
        return [chart for key in keys for chart in _charts(f"{title}: {key}", (key,), runs, metrics)]
    found = [
        # One run: a color for each metric; two: a color for each run, and dashes for each metric
        Curve(number, key, key, of_run[key][0], (place, 0), of_run[key][1])
        if len(runs) == 1
        else Curve(number, key, f"{'AB'[number]} {key}", of_run[key][0], (number, place), of_run[key][1])
        for number, of_run in enumerate(metrics)
        for place, key in enumerate(keys)
        if key in of_run
    ]
    if not found:
        return []
    steps = [row["step"] or 0.0 for run in runs for row in (*run.rows[:1], *run.rows[-1:])]
    limits, marks = _limits(keys, runs), _marks(keys, runs)
    chart = draw_chart(title, unit_of(keys[0]), (min(steps), max(steps)), found, limits, marks)
    return [] if chart is None else [chart]


def _limits(keys: Sequence[str], runs: Sequence[RunRecords]) -> list[Limit]:
    """Return the bounds of `guard` on these metrics, with their changes during the run."""
    found = []
    for number, run in enumerate(runs):
        for bound in BOUNDS:
            setting = f"guard.{bound.setting}"
            changes = [(e["step"], e.get("new")) for e in run.current_events if _changes(e, setting)]
            values = [(0.0, run.settings.get(setting)), *changes]
            drawn = [(step, value if is_number(value) else None) for step, value in values]
            if bound.metric in keys and any(value is not None for _, value in drawn):
                found.append(Limit(setting if len(runs) == 1 else f"{'AB'[number]} {setting}", drawn))
    return found


def _changes(event: Event, setting: str) -> bool:
    return event["event"] == "setting_changed" and event.get("key") == setting and is_number(event.get("step"))


def _marks(keys: Sequence[str], runs: Sequence[RunRecords]) -> list[tuple[float, str]]:
    found = []
    for number, run in enumerate(runs):
        for event in run.current_events:
            where = (event.get("metric"),) if event["event"] == "bound_left" else DRAWN_EVENTS.get(event["event"], ())
            if is_number(event.get("step")) and any(key in where for key in keys):
                who = "" if len(runs) == 1 else f"{'AB'[number]}: "
                text = f"{who}step {event['step']:g}: {event['event']} {event_details(event)}"
                found.append((event["step"], text))
    return found


def event_details(event: Event) -> str:
    """Return the fields of an event as text."""
    return ", ".join(f"{key}: {value}" for key, value in event.items() if key not in ("event", "time", "step"))
