"""Runs a rank that does not train in a child process, and starts it again when it is lost: the run goes on meanwhile.

The child tells through its standard output, which is a pipe, that it is alive and what state it has reached. One that
does not is killed.
"""

from __future__ import annotations

import functools
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from hybrid3d import launch_environment
from hybrid3d.launch_environment import (
    BEAT_SECONDS,
    CHECKED,
    DISCONNECTED,
    END_SECONDS,
    EXIT_SECONDS,
    FORGIVEN_SECONDS,
    START_SECONDS,
    State,
    heartbeat_seconds,
)
from hybrid3d.process import adopt_orphans, kill_descendants, kill_when_parent_exits
from hybrid3d.run.ends import Ended, read_end
from hybrid3d.run.folder import RunFolder

RESTART_COUNT, FAILURE = "HYBRID3D_RESTART_COUNT", "HYBRID3D_RESTART_FAILURE"
MAX_FAILURE_TEXT = 1000  # characters of a reason that are kept


class ChildProcess:
    """This process as the child that runs a rank; where the rank has no such parent, nothing is told.

    It is made before standard output becomes the rank's log.

    Attributes:
        restart_count: how many times the rank was started before.
        failure: why the process before this one ended; empty if this is the first.
    """

    def __init__(self) -> None:
        self.restart_count, self.failure = int(os.environ.get(RESTART_COUNT, 0)), os.environ.get(FAILURE, "")
        self._pipe = os.dup(1) if FAILURE in os.environ else None  # those that train tell nothing
        if self._pipe is not None:
            threading.Thread(target=self._beat, name="alive", daemon=True).start()

    def tell(self, state: State) -> None:
        """Tell the parent that this process has reached a state; without the parent this process is killed, too."""
        if self._pipe is not None:
            try:
                os.write(self._pipe, state.value)
            except BrokenPipeError:  # the kernel does not kill this process if the parent has died before it could ask
                os.kill(os.getpid(), signal.SIGKILL)

    def _beat(self) -> None:
        while True:
            self.tell(State.ALIVE)
            time.sleep(BEAT_SECONDS)


class RunEnd:
    """Whether the run has ended, as a thread finds out once it is asked to.

    Attributes:
        has_come: it has ended.
    """

    def __init__(self, wait: Callable[[], None]):
        """
        Args:
            wait: returns when the run has ended.
        """
        self._wait, self._thread = wait, threading.Thread(target=self._watch, name="end of the run", daemon=True)
        self.has_come = False

    def begin(self) -> None:
        """Begin to wait for it, the first time."""
        if self._thread.ident is None:
            self._thread.start()

    def _watch(self) -> None:
        self._wait()
        self.has_come = True


def is_child() -> bool:
    """Return whether this process was started by one that starts its rank again."""
    return RESTART_COUNT in os.environ


@functools.cache
def this_process() -> ChildProcess:
    """Return this process as the child that runs a rank; from the first call on it tells that it is alive."""
    return ChildProcess()


def become_parent() -> None:
    """Prepare this process, which runs a rank in a child process: what the child leaves ends with it."""
    kill_when_parent_exits(os.getppid())
    adopt_orphans()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the child dies with it


def start_child(
    restart_count: int, variables: Mapping[str, str] | None = None, stdout: int | None = None
) -> subprocess.Popen[bytes]:
    """Start this process's command as the child that runs the rank."""
    told = {RESTART_COUNT: str(restart_count), CHECKED: "1", **(variables or {})}  # the checks are done
    command = [sys.executable, "-m", "hybrid3d", *sys.argv[1:]]
    return subprocess.Popen(command, env=os.environ | told, stdout=stdout)


def run_with_restarts(folder: RunFolder, role: str, max_restarts: int, run_end: RunEnd) -> tuple[int, Ended | None]:
    """Run this rank's command as a child process, again each time it is lost, until it ends.

    It is not started again if it fails by itself before it was ready, as it would fail again.

    Args:
        run_end: of which a child that is stopped does not hear.

    Returns:
        The exit code, and how it has ended (None where it has succeeded, or the child, or another rank, reports it).
    """
    become_parent()
    rank, why, was_ready, started, restarts, pauses = launch_environment.rank(), "", False, 0, 0, 0
    while True:
        code, states, ready_seconds = _run_child(started, why, run_end)
        started += 1
        if code < 0 and run_end.has_come:
            return 0, None
        if State.LEAVING.value in states:
            was_ready, why = True, ""
            continue
        if code == 0 or State.ENDING.value in states:
            return 0, None
        written = folder.failure_path(rank).exists()
        end = read_end(folder, rank) or _end_by_code(rank, code)
        why = end.reason
        if code == 1 and State.CONNECTED.value in states and not written:  # rank 0 hangs, and it has reported that
            return 1, None
        if code in (1, 2) and State.CONNECTED.value not in states and not written:  # the ranks have not met, or the
            return (code if started == 1 else 0), None  # store is gone because the run has ended
        was_ready |= State.READY.value in states
        if not (was_ready or code < 0 or end.peer):
            return 1, Ended(rank, why, peer=end.peer)
        if ready_seconds > FORGIVEN_SECONDS:
            restarts = 0
        pauses = 0 if State.READY.value in states else pauses + 1
        if restarts == max_restarts:
            again = f"; it was started again {max_restarts} times: raise roles.{role}.max_restarts"
            return 1, Ended(rank, why + (again if max_restarts else ""), peer=end.peer)
        restarts += 1
        with suppress(OSError):
            folder.failure_path(rank).unlink()
        time.sleep(min(END_SECONDS, 2.0**pauses - 1))


def _run_child(restart_count: int, failure: str, run_end: RunEnd) -> tuple[int, bytes, float]:
    """Run the child once; return its exit code, negative for a signal, its states, and the seconds since `READY`."""
    told = failure.replace("\0", "")[:MAX_FAILURE_TEXT].encode(errors="backslashreplace").decode()
    child = start_child(restart_count, {FAILURE: told}, subprocess.PIPE)
    assert child.stdout is not None
    pipe, states, silent, ready_at = child.stdout.fileno(), b"", 0.0, None
    poll, before = select.poll(), time.monotonic()
    poll.register(pipe, select.POLLIN | select.POLLHUP)
    while child.poll() is None:
        if poll.poll(1000 * BEAT_SECONDS):
            data = os.read(pipe, 4096)
            if not data:  # it exits
                break
            states, silent = states + data.replace(State.ALIVE.value, b""), 0.0
        if State.CONNECTED.value in states:
            run_end.begin()
        now = time.monotonic()
        silent, before = silent + min(now - before, 2 * BEAT_SECONDS), now  # not the time in which both were suspended
        if ready_at is None and State.READY.value in states:
            ready_at = now
        patience = heartbeat_seconds() if ready_at is not None else max(heartbeat_seconds(), START_SECONDS)
        if silent > (EXIT_SECONDS if run_end.has_come else patience):
            child.send_signal(signal.SIGKILL)
    child.wait()
    kill_descendants()  # which may have the pipe too
    while data := os.read(pipe, 4096):
        states += data.replace(State.ALIVE.value, b"")
    child.stdout.close()
    return child.returncode, states, 0.0 if ready_at is None else time.monotonic() - ready_at


def _end_by_code(rank: int, code: int) -> Ended:
    """Return how the child has ended that has left no record."""
    if code == DISCONNECTED:
        return Ended(rank, "its connection to rank 0 ended", peer=True)
    return Ended.by_code(rank, code)
