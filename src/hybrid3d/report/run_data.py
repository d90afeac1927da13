"""Reads the folder of a run that has finished, stopped, or is still going on, whatever a crash has left in it.

Samples are selected in one pass over a file of any size and in bounded memory.
"""

from __future__ import annotations

import fcntl
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from pathlib import Path
from typing import Any, TypeGuard, cast

import yaml

from hybrid3d.config import RecipeError
from hybrid3d.config.load import with_present_settings
from hybrid3d.config.schema import flatten_settings, read_yaml
from hybrid3d.report.timeline import Timeline, read_timeline
from hybrid3d.run.ends import read_ends
from hybrid3d.run.folder import LOCK, RunFolder

MAX_LINE = 2**24  # bytes; a longer line of a record is skipped
MAX_STEP = 2**52  # from about there on, one step more is the same floating-point number
MAX_NUMBER = 1e300  # larger numbers, which no metric has, would overflow when a curve is scaled
MAX_FAILURE = 4000  # characters of a failed rank's reason
MAX_FAILURES = 8  # ranks whose reasons are read
HEAD, TAIL = 4000, 2000  # characters of a longer text that are shown

MEMORY = "memory/"  # of the keys of memory.jsonl

FINISHED, GOING_ON, STOPPED = "finished", "going on", "stopped"

Row = dict[str, float | None]
Event = dict[str, Any]


@dataclass(frozen=True)
class RunRecords:
    """What the folder of a run holds, except for its samples."""

    path: Path
    name: str  # the recipe's name of the run
    state: str  # FINISHED, GOING_ON (a process uses the folder), or STOPPED before the end
    settings: dict[str, Any]  # of the recipe, by their dotted keys
    rows: Sequence[Row]  # of metrics.jsonl, by step, with those of memory.jsonl; a value that is not finite is None
    memory_device: str | None  # whose memory was measured, `cuda` or `cpu`; None if none was
    events: Sequence[Event]
    timeline: Timeline | None
    failures: Sequence[str]  # the reasons of ranks that have failed
    unreadable: dict[str, int]  # by file, the lines that are no records, such as one that a crash has cut off

    @property
    def steps(self) -> int | None:
        """The number of the run's last step, which `control.yaml` may have changed."""
        events = self.current_events
        changes = [e.get("new") for e in events if e.get("event") == "setting_changed" and e.get("key") == STEPS]
        steps = [value for value in (self.settings.get(STEPS), *changes) if type(value) is int]
        return steps[-1] if steps else None

    @property
    def current_events(self) -> Sequence[Event]:
        """The events without those of steps that were abandoned, because the run went back to an earlier checkpoint."""
        kept: list[Event] = []
        for event in self.events:
            if event["event"] in ("start", "resume") and is_number(event.get("step")):
                kept = [one for one in kept if not _is_repeated(one, event["step"])]
            kept.append(event)
        return kept

    @property
    def is_split(self) -> bool:
        """Whether other ranks generate than train."""
        return bool(self.settings.get("roles.generation.ranks"))

    def metric(self, key: str) -> list[tuple[float, float]]:
        """Return a metric as (step, value), without steps that lack it or where it is not finite."""
        found = ((row["step"], row.get(key)) for row in self.rows)
        return [(step, value) for step, value in found if step is not None and value is not None]


STEPS = "run.steps"
BEFORE_A_STEP = ("start", "resume", "checkpoint", "disk_low", "end")  # events with the step that comes next


def read_run(path: Path) -> RunRecords:
    """Read the folder of a run.

    Raises:
        RecipeError: it is not the folder of a run.
    """
    folder = RunFolder(path)
    if not path.is_dir():
        problem = "it is a file" if path.exists() else "there is no such folder"
        raise RecipeError(str(path), [f"not the folder of a run: {problem}"])
    folder.check()
    if not folder.recipe.exists():
        raise RecipeError(str(path), ["not the folder of a run: it has no recipe.yaml"])
    try:
        settings = flatten_settings(with_present_settings(read_yaml(folder.recipe), []))
    except ValueError as error:
        raise error if isinstance(error, RecipeError) else RecipeError(str(folder.recipe), [str(error)]) from None
    unreadable: dict[str, int] = {}
    memory: dict[float | None, Row] = {}
    device: str | None = None
    for row, measured_on in _read(folder.memory, _memory_row, unreadable):
        memory[row["step"]], device = row, measured_on
    rows = sorted(_read(folder.metrics, _metrics_row, unreadable), key=lambda row: row["step"] or 0)
    rows = [row | memory.get(row["step"], {}) for row in rows]
    events = list(_read(folder.events, _event, unreadable))
    return RunRecords(
        path=path,
        name=str(settings.get("name", path.name)),
        state=_state(folder, events),
        settings=settings,
        rows=rows,
        memory_device=device,
        events=events,
        timeline=read_timeline(folder.timeline),
        failures=_failures(folder),
        unreadable=unreadable,
    )


def read_lines(path: Path) -> Iterator[Any]:
    """Yield what each line of a record says, parsed as JSON, and None for a line that is not JSON or has no end."""
    try:
        file = open(path, "rb")  # noqa: SIM115 (closed below)
    except OSError:
        return
    with file:
        while line := file.readline(MAX_LINE):
            complete = line.endswith(b"\n")
            end = line
            while not end.endswith(b"\n") and (end := file.readline(MAX_LINE)):
                pass
            try:
                yield json.loads(line) if complete else None
            except (ValueError, RecursionError):
                yield None


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value of a record is a number that can be drawn."""
    return type(value) in (int, float) and abs(cast(float, value)) < MAX_NUMBER  # false for NaN


def _read(path: Path, read_one: Any, unreadable: dict[str, int]) -> Iterator[Any]:
    for parsed in read_lines(path):
        record = read_one(parsed)
        if record is None:
            unreadable[path.name] = unreadable.get(path.name, 0) + 1
        else:
            yield record


def _metrics_row(parsed: Any) -> Row | None:
    if not isinstance(parsed, dict) or not is_number(parsed.get("step")) or abs(parsed["step"]) > MAX_STEP:
        return None
    measured = {key: value for key, value in parsed.items() if value is None or type(value) in (int, float)}
    return {key: value if is_number(value) else None for key, value in measured.items()}


def _memory_row(parsed: Any) -> tuple[Row, str] | None:
    row = _metrics_row(parsed)
    if row is None or parsed.get("device") not in ("cuda", "cpu"):
        return None
    return {key: value for key, value in row.items() if key == "step" or key.startswith(MEMORY)}, parsed["device"]


def _event(parsed: Any) -> Event | None:
    if not isinstance(parsed, dict) or not isinstance(parsed.get("event"), str):
        return None
    time = parsed.get("time")
    return {**parsed, "time": time if is_number(time) else None}


def _is_repeated(event: Event, step: float) -> bool:
    """Return whether an event is of a step that a run which goes on at `step` does again."""
    at = event.get("step")
    return is_number(at) and (at > step or (at == step and not event["event"].startswith(BEFORE_A_STEP)))


def _state(folder: RunFolder, events: Sequence[Event]) -> str:
    if _is_locked(folder.path / LOCK):
        return GOING_ON
    turns = [event["event"] for event in events if event["event"] in ("start", "resume", "end")]
    return FINISHED if turns[-1:] == ["end"] else STOPPED


def _is_locked(path: Path) -> bool:
    """Return whether a process holds the run's lock."""
    try:
        with open(path, "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # there is no lock, or its file system has none
        return False
    return False


def _failures(folder: RunFolder) -> list[str]:
    return [
        f"{path.name} cannot be read" if end is None else f"rank {end.rank}: {end.reason}"[:MAX_FAILURE]
        for path, end in islice(read_ends(folder), MAX_FAILURES)
    ]


def setting_text(value: Any) -> str:
    """Return a setting's value as YAML in one line."""
    return (
        str(yaml.safe_dump(value, default_flow_style=True, width=math.inf, allow_unicode=True))
        .removesuffix("\n...\n")
        .strip()
    )


@dataclass
class SampleSelection:
    """The samples of a run that fit a budget of bytes: those of every n-th step and of the last."""

    shown: list[dict[str, Any]] = field(default_factory=list)  # as the page embeds them
    total: int = 0  # in the file
    every: int = 1  # n
    shortened: int = 0  # of those shown, how many have a text that is cut in its middle
    unreadable: int = 0  # lines of the file that are no samples


def select_samples(path: Path, max_bytes: int) -> SampleSelection:
    """Select samples of `samples.jsonl`, evenly over the steps, whose JSON has at most `max_bytes` together."""
    selection = SampleSelection()  # a quarter of the bytes is left for the last step
    kept: dict[int, tuple[list[dict[str, Any]], int]] = {}  # by the place of their step: samples and their bytes
    last: tuple[int, list[dict[str, Any]], int] = (-1, [], 0)
    size = 0
    for place, (_, group) in enumerate(groupby(_samples(path, selection), key=lambda sample: sample["step"])):
        samples, nbytes = _within(group, max_bytes // 4)
        last = place, samples, nbytes
        if place % selection.every == 0:
            kept[place] = samples, nbytes
            size += nbytes
        while size > max_bytes * 3 // 4 and len(kept) > 1:
            selection.every *= 2
            size -= sum(kept.pop(other)[1] for other in list(kept) if other % selection.every)
    kept.setdefault(last[0], last[1:])
    selection.shown = [sample for place in sorted(kept) for sample in kept[place][0]]
    selection.shortened = sum(sample.pop("shortened") for sample in selection.shown)
    return selection


def _samples(path: Path, selection: SampleSelection) -> Iterator[dict[str, Any]]:
    for parsed in read_lines(path):
        if not isinstance(parsed, dict) or not is_number(parsed.get("step")):
            selection.unreadable += 1
            continue
        selection.total += 1
        sample: dict[str, Any] = {"step": parsed["step"], "shortened": False}
        for key in ("reward", "weights"):
            value = parsed.get(key)
            sample[key] = value if is_number(value) else None
        for key in ("prompt", "answer"):
            text = parsed.get(key)
            text = text if isinstance(text, str) else json.dumps(text)
            sample["shortened"] |= len(text) > HEAD + TAIL
            sample[key] = shorten(text)
        for key in ("prompt_tokens", "answer_tokens"):
            tokens = parsed.get(key)
            sample[key] = len(tokens) if isinstance(tokens, list) else None
        yield sample


def _within(samples: Iterator[dict[str, Any]], max_bytes: int) -> tuple[list[dict[str, Any]], int]:
    """Return the first samples of a step whose JSON fits, and its bytes; all are read."""
    kept, size = [], 0
    for sample in samples:
        nbytes = len(json.dumps(sample))
        if size + nbytes <= max_bytes:
            kept.append(sample)
            size += nbytes
    return kept, size


def shorten(text: str, head: int = HEAD, tail: int = TAIL) -> str:
    """Return a text without the middle of what exceeds `head + tail` characters."""
    left_out = len(text) - head - tail
    return text if left_out <= 0 else f"{text[:head]}\n[… {left_out:,} characters …]\n{text[len(text) - tail :]}"
