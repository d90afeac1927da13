"""A run's folder: the resolved recipe, metrics, samples, events, logs, curves and checkpoints."""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hybrid3d.config import Recipe, RecipeError, recipe_to_yaml
from hybrid3d.errors import UserMistake
from hybrid3d.storage.disk import CheckpointWriteError, why_unwritten

LOCK = ".lock"
HELD_SECONDS = 100  # more than the lease that NFS gives, 90


class RunFolder:
    """Paths of a run, and appending to its records, which rank 0 alone does. See `docs/run-folder.md` for the keys."""

    def __init__(self, path: Path):
        self.path = path
        self.recipe = path / "recipe.yaml"
        self.control = path / "control.yaml"
        self.metrics = path / "metrics.jsonl"
        self.samples = path / "samples.jsonl"
        self.events = path / "events.jsonl"
        self.curves = path / "curves.png"
        self.logs = path / "logs"
        self.checkpoints = path / "checkpoints"

    @classmethod
    def of(cls, recipe: Recipe) -> RunFolder:
        return cls(Path(recipe.run.dir) / recipe.name)

    def logging_to(self, name: str) -> RunFolder:
        """The same folder for a command that may run beside training: its logs are under a name of their own."""
        other = RunFolder(self.path)
        other.logs = self.logs / name
        return other

    def check(self) -> None:
        """Check that what is there under the names of a run's files and folders is of the right kind.

        Raises:
            RecipeError: a file where a run has a folder, or the reverse; all that is wrong.
        """
        inner = [path for path in (self.logs, *self.logs.parents) if self.path in path.parents]
        files = (self.recipe, self.metrics, self.samples, self.events, self.curves, self.path / LOCK)
        kinds = dict.fromkeys((self.path, self.checkpoints, *inner), (os.path.isdir, "a folder"))
        kinds |= dict.fromkeys(files, (os.path.isfile, "a file"))
        problems = [
            f"{path} is not {kind}, and a run keeps {kind} of this name: move it elsewhere"
            for path, (is_right, kind) in kinds.items()
            if os.path.lexists(path) and not is_right(path)
        ]
        if problems:
            raise RecipeError(str(self.path), problems)

    def make_logs(self) -> None:
        """Make the folder of the ranks' logs. RecipeError: it cannot be made."""
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RecipeError(str(self.path), [f"{self.logs} cannot be written ({error.strerror})"]) from None

    @contextmanager
    def held(self, say: Callable[[str], None]) -> Iterator[None]:
        """Keep other starts out meanwhile, which would write the same records and checkpoints.

        What holds the folder is waited for a while: a start that was killed lets go of it when it is gone, one whose
        machine died when the file server thinks so.

        Raises:
            RecipeError: it is held still, or cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = open(self.path / LOCK, "a+")  # noqa: SIM115 (closed below)
        except OSError as error:
            problem = f"{self.path} cannot be written ({error.strerror}): set another run.dir"
            raise RecipeError(self.path.name, [problem]) from error
        with lock:
            for second in range(HELD_SECONDS + 1):
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    lock.seek(0)
                    by = f"{self.path} is used by {lock.read().strip() or 'another start'}"
                    if second == 0:
                        say(f"{by}: waiting {HELD_SECONDS} seconds for its end")
                    if second == HELD_SECONDS:
                        fix = f"wait for its end, or set another name; if it is gone for good, remove {lock.name}"
                        raise RecipeError(self.path.name, [f"{by}: {fix}"]) from None
                    time.sleep(1)
                except OSError:  # a file system without locks
                    break
            with suppress(OSError):  # a disk that is full
                os.ftruncate(lock.fileno(), 0)
                os.write(lock.fileno(), f"process {os.getpid()} on {socket.gethostname()}\n".encode())
            yield

    def create(self, recipe: Recipe) -> None:
        """What was there stays, but for half a line of events, which a full disk cut off and the next would follow."""
        self.logs.mkdir(parents=True, exist_ok=True)
        told = recipe_to_yaml(recipe)
        if not self.recipe.exists() or self.recipe.read_text() != told:
            _replace(self.recipe, told)
        if self.events.exists():
            whole = "".join(f"{line}\n" for line in _whole_lines(self.events))
            os.truncate(self.events, len(whole.encode()))

    def log_of(self, rank: int) -> Path:
        return self.logs / f"rank-{rank}.log"

    def failure_of(self, rank: int) -> Path:
        """Where a rank that fails leaves its one-line reason for whoever started it."""
        return self.logs / f"rank-{rank}.failure"

    def relief_of(self, count: int) -> Path:
        """Return the path of the n-th out-of-memory record."""
        return self.path / f"out-of-memory-{count}.json"

    def add_metrics(self, row: Mapping[str, float | None]) -> None:
        _append(self.metrics, [row])

    def add_samples(self, rows: Iterable[Mapping[str, Any]]) -> None:
        _append(self.samples, rows)

    def add_event(self, event: str, **fields: Any) -> None:
        _append(self.events, [{"time": round(time.time(), 3), "event": event, **fields}])

    def read_metrics(self) -> list[dict[str, float]]:
        return [json.loads(line) for line in _whole_lines(self.metrics)]

    def truncate(self, step: int) -> None:
        """Drop what was recorded from `step` on: a resumed run records it again."""
        for path in (self.metrics, self.samples):
            kept = [line for number, line in enumerate(_whole_lines(path), 1) if _step_of(path, number, line) < step]
            _replace(path, "".join(f"{line}\n" for line in kept))


def _whole_lines(path: Path) -> list[str]:
    """The lines of a record; what follows the last newline was cut off in writing."""
    return path.read_text().split("\n")[:-1] if path.exists() else []


def _step_of(path: Path, number: int, line: str) -> int:
    """The step of a record. ValueError: it is none; with its file and line."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        problem = f"{path}, line {number} is no record of a step ({type(error).__name__}: {error})"
        raise ValueError(f"{problem}: mend or remove the line, then start again") from None


class NoCheckpoint(UserMistake):
    """There is no checkpoint of the step that was asked for: the message lists those that there are."""


def checkpoint_folder(folder: RunFolder, updates: int) -> Path:
    """Where the policy is after so many updates."""
    return folder.checkpoints / f"step-{updates:06d}"


def steps_in(folder: RunFolder) -> list[int]:
    """Numbers of updates with a complete checkpoint, ascending."""
    found = (re.fullmatch(r"step-(\d{6,})", entry.name) for entry in folder.checkpoints.glob("step-*"))
    return sorted(int(match[1]) for match in found if match)


def find_step(folder: RunFolder, step: int | None) -> int:
    """The step asked for, or the last there is; NoCheckpoint where there is none."""
    steps = steps_in(folder)
    if not steps or (step is not None and step not in steps):
        wanted = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        raise NoCheckpoint(f"{folder.path} has {wanted}; there are: {', '.join(map(str, steps)) or 'none'}")
    return steps[-1] if step is None else step


def _replace(path: Path, text: str) -> None:
    """Write a file anew; a run that is killed meanwhile finds it as it was."""
    replacement = path.with_suffix(".tmp")
    with open(replacement, "w") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())
    os.replace(replacement, path)


def _append(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    try:
        with open(path, "a") as out:
            out.writelines(json.dumps(row) + "\n" for row in rows)
    except OSError as error:
        raise CheckpointWriteError(why_unwritten(path, error)) from error


def draw_curves(folder: RunFolder) -> None:
    """Reward, held-out accuracy, mismatch and sync over the steps, as one picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = folder.read_metrics()
    panels = {
        "reward and held-out accuracy": ("reward/mean", "eval/accuracy"),
        "loss": ("train/loss",),
        "train against rollout: largest |difference| of a token's logprob": ("mismatch/logprob_abs_max",),
        "bytes received by a sync, all ranks": ("sync/received_bytes", "sync/lower_bound_bytes"),
        "seconds": ("time/step", "time/generate", "time/train", "sync/seconds"),
    }
    shown = {title: keys for title, keys in panels.items() if any(key in row for row in rows for key in keys)}
    figure, axes = pyplot.subplots(len(shown), 1, figsize=(8, 2.6 * len(shown)), sharex=True, squeeze=False)
    for axis, (title, keys) in zip(axes[:, 0], shown.items(), strict=True):
        for key in keys:
            points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
            style = "o-" if key == "eval/accuracy" else "--" if key.endswith("lower_bound_bytes") else "-"
            if points:
                axis.plot(*zip(*points, strict=True), style, label=key, markersize=4)
        axis.set_title(title, fontsize=10)
        axis.set_ylim(bottom=0 if min(row.get(key) or 0 for row in rows for key in keys) >= 0 else None)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    axes[-1, 0].set_xlabel("step")
    figure.tight_layout()
    figure.savefig(folder.curves, dpi=110)
    pyplot.close(figure)
