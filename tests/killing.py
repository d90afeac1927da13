"""Starts runs and kills all ranks at once at a chosen moment."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from run_ranks import environment, kill_marked, marked

REACHED = 300  # seconds in which a run must come to the moment; generous, because machines are shared
ENDED = 30  # in which nothing of a killed run may be left

Moment = Callable[[Path], bool]
"""Whether a run, by what is in its folder, is where it is to be killed."""


def after(rows: int) -> Moment:
    """Return the condition that a run has recorded this many steps."""
    return lambda run: (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").read_text().count("\n") >= rows


def writing(updates: int) -> Moment:
    """Return the condition that a run is writing the checkpoint after this many updates."""
    return lambda run: (run / "checkpoints" / f"step-{updates:06d}.partial").exists()


def start_and_kill(folder: Path, arguments: list[str], run: Path, moment: Moment, delay: float) -> bool:
    """Run `hybrid3d train ARGUMENTS`, kill its ranks some seconds after the moment, and return whether it occurred.

    Check that neither the launcher nor processes forked by ranks survive.
    """
    mark = uuid.uuid4().hex
    command = [sys.executable, "-m", "hybrid3d", "train", *arguments]
    process = subprocess.Popen(command, cwd=folder, env=environment(mark), stdout=subprocess.DEVNULL)
    before = _starts(run)
    try:
        end = time.monotonic() + REACHED
        while not (_starts(run) > before and moment(run)) and process.poll() is None:
            assert time.monotonic() < end, f"not at the moment after {REACHED} s"
            time.sleep(0.005)
        time.sleep(delay)
        ranks = [pid for pid in marked(mark) if _parent(pid) == process.pid]
        for pid in ranks:
            os.kill(pid, signal.SIGKILL)
        code = process.wait(ENDED)
        if code == 0:
            return False
        assert len(ranks) > 1
        while left := marked(mark):
            assert time.monotonic() < end, f"still there: {[_command(pid) for pid in left]}"
            time.sleep(0.1)
            end = min(end, time.monotonic() + ENDED)
        return True
    finally:
        kill_marked(mark)
        process.wait()


def _starts(run: Path) -> int:
    """Count the starts and resumes of a run, whose folder has the records of a killed run until it starts."""
    events = run / "events.jsonl"
    told = events.read_text() if events.exists() else ""
    return told.count('"event": "start"') + told.count('"event": "resume"')


def some_moment(dice: random.Random, steps: int) -> tuple[Moment, float]:
    """Return a random step of a run, and a delay within it."""
    return after(dice.randint(1, steps)), dice.uniform(0, 1.0)  # of a tiny run: about as long as a step


def _parent(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:  # it has ended
        return 0
    return next(int(line.split()[1]) for line in lines if line.startswith("PPid:"))


def _command(pid: int) -> str:
    path = Path(f"/proc/{pid}/cmdline")
    return path.read_text().replace("\0", " ") if path.exists() else "ended"
