"""Runs a rank that generates in a process of its own, and starts it again when it is lost: the run goes on meanwhile.

The process says through its standard output, which is a pipe, that it is alive and how far it has come. One that is
silent is killed.
"""

from __future__ import annotations

import functools
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

from hybrid3d import launch_environment
from hybrid3d.launch_environment import BEAT_SECONDS, CHECKED, DISCONNECTED, heartbeat_seconds
from hybrid3d.process import adopt_orphans, kill_descendants, kill_when_parent_exits
from hybrid3d.run.heartbeat import START_SECONDS
from hybrid3d.run.run_folder import RunFolder

ATTEMPT, LOST = "HYBRID3D_ATTEMPT", "HYBRID3D_ATTEMPT_LOST"
ALIVE, CONNECTED, READY, LEAVING, ENDING = b"[alive]", b"[connected]", b"[ready]", b"[leaving]", b"[ending]"


class Attempt:
    """This process as one attempt of its rank, which its parent watches; without a parent that does, nothing is said.

    It is made before standard output becomes the rank's log.

    Attributes:
        number: how many times the rank was started before.
        lost: why the process before this one ended; empty if this is the first.
    """

    def __init__(self) -> None:
        self.number, self.lost = int(os.environ.get(ATTEMPT, 0)), os.environ.get(LOST, "")
        self._pipe = os.dup(1) if is_attempt() else None
        if self._pipe is not None:
            threading.Thread(target=self._beat, name="alive", daemon=True).start()

    def connected(self) -> None:
        """It has found the run."""
        self._tell(CONNECTED)

    def ready(self) -> None:
        """Its engine has weights."""
        self._tell(READY)

    def leaving(self) -> None:
        """Its engine is not needed for now."""
        self._tell(LEAVING)

    def ending(self) -> None:
        """The run has ended, and this process is about to."""
        self._tell(ENDING)

    def _tell(self, what: bytes) -> None:
        if self._pipe is not None:
            with suppress(OSError):
                os.write(self._pipe, what)

    def _beat(self) -> None:
        while True:
            self._tell(ALIVE)
            time.sleep(BEAT_SECONDS)


def is_attempt() -> bool:
    """Return whether this process was started by `run_attempts`."""
    return ATTEMPT in os.environ


@functools.cache
def this_attempt() -> Attempt:
    """Return this process as an attempt of its rank; the first call begins to tell the parent that it is alive."""
    return Attempt()


def run_attempts(folder: RunFolder, max_restarts: int) -> tuple[int, str]:
    """Run this rank's command as a child process, again each time it is lost, until it ends.

    It is not started again if no attempt had weights before, as the next one would fail for the same reason, and not if
    the last one did not find the run.

    Returns:
        The exit code, and why it failed; empty if that was not this rank's failure.
    """
    kill_when_parent_exits(os.getppid())
    adopt_orphans()
    rank, lost, was_ready, attempt, restarts = launch_environment.rank(), "", False, 0, 0
    while restarts <= max_restarts:
        code, said = _run_attempt(attempt, lost)
        attempt += 1
        if LEAVING in said:
            was_ready, lost = True, ""
            continue
        if code == 0 or ENDING in said:
            return 0, ""
        restarts += 1
        failure = folder.failure_path(rank)
        lost, is_peer = _reason(code), code == DISCONNECTED
        with suppress(OSError, ValueError):
            written = json.loads(failure.read_text())
            lost, is_peer = written["reason"], written["peer"]
        if CONNECTED not in said and code > 0:  # it did not find the run, which may have ended
            return code, "" if attempt > 1 else lost
        was_ready |= READY in said
        if not was_ready:
            return 1, "" if is_peer else lost
        with suppress(OSError):
            failure.unlink()
    again = f"; it was started again {max_restarts} times (roles.generation.max_restarts)" if max_restarts else ""
    return 1, lost + again


def _run_attempt(attempt: int, lost: str) -> tuple[int, bytes]:
    """Run one attempt; return its exit code, negative for a signal, and what it has told."""
    variables = os.environ | {ATTEMPT: str(attempt), LOST: lost, CHECKED: "1"}  # the checks are done
    command = [sys.executable, "-m", "hybrid3d", *sys.argv[1:]]
    child = subprocess.Popen(command, env=variables, stdout=subprocess.PIPE)
    assert child.stdout is not None
    reading = child.stdout.fileno()
    said, poll, heard = b"", select.poll(), time.monotonic()
    poll.register(reading, select.POLLIN | select.POLLHUP)
    while child.poll() is None:
        if poll.poll(1000 * BEAT_SECONDS):
            heard_now = os.read(reading, 4096)
            if not heard_now:  # it exits
                break
            said, heard = said + heard_now.replace(ALIVE, b""), time.monotonic()
        limit = heartbeat_seconds() if READY in said else max(heartbeat_seconds(), START_SECONDS)
        if time.monotonic() - heard > limit:
            child.send_signal(signal.SIGKILL)
    child.wait()
    kill_descendants()  # which may have the pipe too
    while rest := os.read(reading, 4096):
        said += rest.replace(ALIVE, b"")
    child.stdout.close()
    return child.returncode, said


def _reason(code: int) -> str:
    if code == DISCONNECTED:
        return "its connection to rank 0 was cut"
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
