"""The folder of a run: the resolved recipe, metrics, samples, events, logs, curves and checkpoints."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hybrid3d.config import Recipe, RecipeError, recipe_to_yaml
from hybrid3d.errors import UserMistake
from hybrid3d.storage.disk import CheckpointWriteError, describe_write_error

LOCK = ".lock"
PEAK = "peak_memory_bytes"  # of a timeline's activity
LOCK_TIMEOUT_SECONDS = 100  # longer than the lease of NFS, 90 s


class RunFolder:
    """The paths and records of a run. Only rank 0 writes records; `docs/run-folder.md` describes their keys."""

    def __init__(self, path: Path):
        self.path = path
        self.recipe = path / "recipe.yaml"
        self.id = path / "run.json"
        self.control = path / "control.yaml"
        self.metrics = path / "metrics.jsonl"
        self.memory = path / "memory.jsonl"
        self.samples = path / "samples.jsonl"
        self.events = path / "events.jsonl"
        self.curves = path / "curves.png"
        self.timeline = path / "timeline.json"
        self.timeline_picture = path / "timeline.png"
        self.trackers = path / "trackers.json"
        self.logs = path / "logs"
        self.checkpoints = path / "checkpoints"
        self.step_records = path / "record"
        self.replays = path / "replay"
        self.served = path / "serve"

    @classmethod
    def for_recipe(cls, recipe: Recipe) -> RunFolder:
        """Return the folder of a recipe's run, `run.dir`/`name`."""
        return cls(Path(recipe.run.dir) / recipe.name)

    def with_logs_in(self, name: str) -> RunFolder:
        """Return the same folder with its logs in a subfolder, for a command that may run alongside training."""
        other = RunFolder(self.path)
        other.logs = self.logs / name
        return other

    def check(self) -> None:
        """Check that existing entries with the names of a run's files and folders are files and folders.

        Raises:
            RecipeError: a file where a run has a folder, or vice versa; with all problems.
        """
        log_folders = [path for path in (self.logs, *self.logs.parents) if self.path in path.parents]
        records = (self.metrics, self.memory, self.samples, self.events, self.timeline)
        files = (self.recipe, self.id, *records, self.curves, self.timeline_picture, self.path / LOCK)
        kinds: dict[Path, tuple[Callable[[Path], bool], str]] = dict.fromkeys(
            (self.path, self.checkpoints, self.step_records, *log_folders), (os.path.isdir, "a folder")
        )
        kinds |= dict.fromkeys(files, (os.path.isfile, "a file"))
        problems = [
            f"{path} is not {kind}, but a run needs {kind} of this name: move it elsewhere"
            for path, (is_of_kind, kind) in kinds.items()
            if os.path.lexists(path) and not is_of_kind(path)
        ]
        if problems:
            raise RecipeError(str(self.path), problems)

    def make_logs(self) -> None:
        """Create the folder of the ranks' logs; raise `RecipeError` if it cannot be created."""
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RecipeError(str(self.path), [f"{self.logs} cannot be written ({error.strerror})"]) from None

    @contextmanager
    def lock(self, print_message: Callable[[str], None]) -> Iterator[None]:
        """Lock the folder, so that no other process writes the same records and checkpoints.

        Waits up to `LOCK_TIMEOUT_SECONDS` for the lock: that of a killed process is released when it has exited, that
        of a machine that died when the file server's lease expires. Such a wait is announced by `print_message`.

        Raises:
            RecipeError: the folder is still locked, or cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = open(self.path / LOCK, "a+", encoding="utf-8")  # noqa: SIM115 (closed below)
        except OSError as error:
            problem = f"{self.path} cannot be written ({error.strerror}): set another run.dir"
            raise RecipeError(self.path.name, [problem]) from error
        with lock:
            for second in range(LOCK_TIMEOUT_SECONDS + 1):
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    lock.seek(0)
                    problem = f"{self.path} is used by {lock.read().strip() or 'another run'}"
                    if second == 0:
                        print_message(f"{problem}: waiting up to {LOCK_TIMEOUT_SECONDS} seconds for it to end")
                    if second == LOCK_TIMEOUT_SECONDS:
                        fix = f"wait until it ends, or set another name; if it no longer exists, remove {lock.name}"
                        raise RecipeError(self.path.name, [f"{problem}: {fix}"]) from None
                    time.sleep(1)
                except OSError:  # the file system has no locks
                    break
            with suppress(OSError):  # the disk may be full
                os.ftruncate(lock.fileno(), 0)
                os.write(lock.fileno(), f"process {os.getpid()} on {socket.gethostname()}\n".encode())
            yield

    def create(self, recipe: Recipe) -> None:
        """Create the folder and write the recipe; existing records stay.

        A last line of events.jsonl without a newline, which a full disk has cut off, is removed.
        """
        self.logs.mkdir(parents=True, exist_ok=True)
        text = recipe_to_yaml(recipe)
        if not self.recipe.exists() or self.recipe.read_text(encoding="utf-8") != text:
            replace_file(self.recipe, text)
        if self.events.exists():
            complete = "".join(f"{line}\n" for line in _complete_lines(self.events))
            os.truncate(self.events, len(complete.encode()))

    def log_path(self, rank: int) -> Path:
        """Return the path of a rank's log."""
        return self.logs / f"rank-{rank}.log"

    def failure_path(self, rank: int) -> Path:
        """Return the path of the file in which a failed rank leaves its reason for the launcher."""
        return self.logs / f"rank-{rank}.failure"

    def oom_record_path(self, count: int) -> Path:
        """Return the path of the n-th out-of-memory record."""
        return self.path / f"out-of-memory-{count}.json"

    def add_event(self, event: str, **fields: Any) -> None:
        """Append an event with the current time to events.jsonl."""
        append_rows(self.events, [{"time": round(time.time(), 3), "event": event, **fields}])

    def write_timeline(self, trace: Mapping[str, Any]) -> None:
        """Write the timeline of a step, in place of that of the step before."""
        try:
            replace_file(self.timeline, json.dumps(trace) + "\n", lasting=False)
        except OSError as error:
            raise CheckpointWriteError(describe_write_error(self.timeline, error)) from error

    def write_replay(self, step: int, report: Mapping[str, Any]) -> None:
        """Write the result of a replay of a step, in place of an earlier one."""
        self.replays.mkdir(exist_ok=True)
        replace_file(replay_path(self, step), json.dumps(report, indent=1) + "\n")

    def truncate_records(self, step: int) -> None:
        """Remove metrics, memory, samples, recorded steps and their replays from `step` on.

        A resumed run records these steps again, and may do so with other settings.
        """
        for path in (self.metrics, self.memory, self.samples):
            kept = [line for number, line in enumerate(_complete_lines(path), 1) if _step_of(path, number, line) < step]
            replace_file(path, "".join(f"{line}\n" for line in kept))
        for path in self.step_records.glob("step-*"):
            number = re.fullmatch(r"step-(\d{6,})", path.name)
            if number is None or int(number[1]) >= step:  # others were being written when the run was killed
                shutil.rmtree(path)
        for path in self.replays.glob("step-*.json"):
            number = re.fullmatch(r"step-(\d{6,})\.json", path.name)
            if number is not None and int(number[1]) >= step:
                path.unlink()
        if (traced := _timeline_step(self.timeline)) is not None and traced >= step:
            for path in (self.timeline, self.timeline_picture):
                path.unlink(missing_ok=True)


def _complete_lines(path: Path) -> list[str]:
    """Return the lines of a record without a last line that was cut off before its newline."""
    return path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []


def _timeline_step(path: Path) -> int | None:
    """Return the step of a timeline, None if there is none that can be read."""
    try:
        return int(json.loads(path.read_text(encoding="utf-8"))["otherData"]["step"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _step_of(path: Path, number: int, line: str) -> int:
    """Return the step of a record; `ValueError` with file and number if the line is none."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        problem = f"{path}, line {number} is not a record of a step ({type(error).__name__}: {error})"
        raise ValueError(f"{problem}: fix or remove the line, then start again") from None


class CheckpointNotFound(UserMistake):
    """Raised if there is no checkpoint of the requested step; the message lists the existing ones."""


def checkpoint_folder(folder: RunFolder, updates: int) -> Path:
    """Return the folder of the checkpoint after this many updates."""
    return folder.checkpoints / f"step-{updates:06d}"


def checkpoint_steps(folder: RunFolder) -> list[int]:
    """Return the steps (numbers of updates) of all complete checkpoints, ascending."""
    return _steps_in(folder.checkpoints)


def recorded_folder(folder: RunFolder, step: int) -> Path:
    """Return the folder of a recorded step."""
    return folder.step_records / f"step-{step:06d}"


def recorded_steps(folder: RunFolder) -> list[int]:
    """Return the steps that are recorded completely, ascending."""
    return _steps_in(folder.step_records)


def replay_path(folder: RunFolder, step: int) -> Path:
    """Return the file with the result of the last replay of a step."""
    return folder.replays / f"step-{step:06d}.json"


def served_folder(folder: RunFolder, step: int, key: str) -> Path:
    """Return the folder of the Hugging Face checkpoint that `hybrid3d serve` has written of a step.

    The key is that of the checkpoint, as a run that goes back may train a step anew (`run.identity.derived_key`).
    """
    return folder.served / f"step-{step:06d}-{key}"


def _steps_in(folder: Path) -> list[int]:
    matches = (re.fullmatch(r"step-(\d{6,})", entry.name) for entry in folder.glob("step-*"))
    return sorted(int(match[1]) for match in matches if match)


def find_checkpoint_step(folder: RunFolder, step: int | None) -> int:
    """Return the requested step, or that of the last checkpoint; raise `CheckpointNotFound` if there is none."""
    steps = checkpoint_steps(folder)
    if not steps or (step is not None and step not in steps):
        missing = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        raise CheckpointNotFound(
            f"{folder.path} has {missing}; existing checkpoints: {', '.join(map(str, steps)) or 'none'}"
        )
    return steps[-1] if step is None else step


def replace_file(path: Path, text: str, lasting: bool = True) -> None:
    """Replace a file atomically, so that it is complete even if the process is killed.

    A `lasting` file is on the disk afterwards, which takes a while, in case that the machine fails.
    """
    replacement = path.with_suffix(".tmp")
    with open(replacement, "w", encoding="utf-8") as out:
        out.write(text)
        out.flush()
        if lasting:
            os.fsync(out.fileno())
    os.replace(replacement, path)


def append_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Append rows to a record of JSON Lines; raise `CheckpointWriteError` if the disk does not take them."""
    try:
        with open(path, "a", encoding="utf-8") as out:
            out.writelines(json.dumps(row) + "\n" for row in rows)
    except OSError as error:
        raise CheckpointWriteError(describe_write_error(path, error)) from error


def draw_curves(folder: RunFolder) -> None:
    """Draw reward, held-out accuracy, mismatch and sync over the steps to curves.png."""
    from matplotlib.figure import Figure

    rows = [json.loads(line) for line in _complete_lines(folder.metrics)]
    panels = {
        "reward and held-out accuracy": ("reward/mean", "eval/accuracy"),
        "preference pairs ranked right": ("preference/accuracy", "eval/preference_accuracy"),
        "loss": ("train/loss",),
        "train against rollout: largest |difference| of a token's logprob": ("mismatch/logprob_abs_max",),
        "bytes received by a sync, all ranks": ("sync/received_bytes", "sync/lower_bound_bytes"),
        "seconds": ("time/step", "time/generate", "time/train", "sync/seconds"),
    }
    shown = {title: keys for title, keys in panels.items() if any(key in row for row in rows for key in keys)}
    figure = Figure(figsize=(8, 2.6 * len(shown)), layout="tight")
    axes = figure.subplots(len(shown), 1, sharex=True, squeeze=False)
    for axis, (title, keys) in zip(axes[:, 0], shown.items(), strict=True):
        for key in keys:
            points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
            style = "o-" if key.startswith("eval/") else "--" if key.endswith("lower_bound_bytes") else "-"
            if points:
                axis.plot(*zip(*points, strict=True), style, label=key, markersize=4)
        axis.set_title(title, fontsize=10)
        axis.set_ylim(bottom=0 if min(row.get(key) or 0 for row in rows for key in keys) >= 0 else None)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    axes[-1, 0].set_xlabel("step")
    figure.savefig(folder.curves, dpi=110)
