"""Runs a rank in child processes, one after another, and outlives them: starts one, waits for it, ends what it leaves.

Who does so decides what follows by `policies`. A child that serves tells through its standard output, which is a pipe,
that it is alive and what state it has reached; one that does not is killed.
"""

from __future__ import annotations

import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress

from hybrid3d.launch.child import FAILURE, MAX_FAILURE_TEXT, RESTART_COUNT
from hybrid3d.launch.policies import STOPPED, Exit
from hybrid3d.launch_environment import (
    BEAT_SECONDS,
    CHECKED,
    EXIT_SECONDS,
    START_SECONDS,
    State,
    heartbeat_seconds,
)
from hybrid3d.process import adopt_orphans, kill_when_parent_exits


def become_parent() -> None:
    """Prepare this process, which runs a rank in child processes: what they leave ends with it."""
    kill_when_parent_exits(os.getppid())
    adopt_orphans()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the child dies with it


class RankHost:
    """What runs a rank in child processes of this one, which has become their parent."""

    def __init__(self, tells: bool):
        """
        Args:
            tells: whether the children tell that they are alive.
        """
        self._tells, self._starts = tells, 0

    def start(self, failure: str = "") -> None:
        """Start this process's command as the child that runs the rank.

        Args:
            failure: why the one before has ended.
        """
        told = {RESTART_COUNT: str(self._starts), CHECKED: "1"}  # the checks are done
        if self._tells:
            told[FAILURE] = failure.replace("\0", "")[:MAX_FAILURE_TEXT].encode(errors="backslashreplace").decode()
        self._child = _start(told, subprocess.PIPE if self._tells else None)
        self._starts += 1
        self._states, self._ready_at = b"", math.inf

    def wait(self, is_over: Callable[[bytes], bool], poll_seconds: float = BEAT_SECONDS) -> Exit:
        """Wait until the child has exited. What it leaves is for `kill_descendants`.

        It is killed if it does not tell for too long that it is alive, and soon if nothing more is expected of it.

        Args:
            is_over: whether that is so, by the states that it has told.
            poll_seconds: how often this is asked.
        """
        silent, over, killed = 0.0, False, False
        before = time.monotonic()
        while self._child.poll() is None:
            heard = self._listen(poll_seconds)
            now = time.monotonic()
            passed, before = min(now - before, 2 * poll_seconds), now  # not the time in which both were suspended
            silent = 0.0 if heard else silent + passed
            if State.READY.value in self._states:
                self._ready_at = min(self._ready_at, now)
            if not over and is_over(self._states):
                over, silent = True, 0.0
            if silent > (EXIT_SECONDS if over else self._patience):
                self._child.kill()
                killed = over
        code = STOPPED if killed else self._child.wait()
        while self._listen(0.0):
            pass
        if self._child.stdout is not None:
            self._child.stdout.close()
        return Exit(code, self._states, max(0.0, time.monotonic() - self._ready_at))

    @property
    def _patience(self) -> float:
        """For how many seconds the child may be silent."""
        if not self._tells:
            return math.inf
        return heartbeat_seconds() if self._ready_at < math.inf else max(heartbeat_seconds(), START_SECONDS)

    def _listen(self, seconds: float) -> bool:
        """Wait for what the child tells, or for its end, for so long at most; return whether it has told something."""
        if self._child.stdout is None:
            with suppress(subprocess.TimeoutExpired):
                self._child.wait(seconds)
            return False
        poll = select.poll()
        poll.register(self._child.stdout, select.POLLIN | select.POLLHUP)
        if not poll.poll(1000 * seconds):
            return False
        data = os.read(self._child.stdout.fileno(), 4096)
        if not data:
            self._child.wait()
        self._states += data.replace(State.ALIVE.value, b"")
        return bool(data)


def _start(variables: dict[str, str], stdout: int | None) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "hybrid3d", *sys.argv[1:]]
    return subprocess.Popen(command, env=os.environ | variables, stdout=stdout)
