"""How long processes and their shared memory live: no longer than the process, or the run, that began them."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Container, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import process, resource_tracker, shared_memory
from pathlib import Path
from typing import Any

from hybrid3d.launch_environment import RUN

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 1, 36, 37  # of prctl(2)
ENDING_SECONDS = 10  # in which a process that SIGKILL was sent to is gone, unless a device holds it
DYING_SECONDS = 1.0  # in which the ranks of a launcher that is killed are gone
SHARED_MEMORY = Path("/dev/shm")
TRACKER_SECONDS = 2  # in which a process that keeps count of shared memory ends by itself

_ended: set[int] = set()


def kill_when_parent_exits(parent: int) -> None:
    """Have this process, which `parent` has just started, be killed when that ends (Linux: PR_SET_PDEATHSIG)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it has ended already
            os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends, daemons too (Linux: PR_SET_CHILD_SUBREAPER)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


@contextmanager
def kill_descendants_on_exit() -> Iterator[None]:
    """At the end, kill every process that was started within and lives on, however it has left its parent."""
    if sys.platform != "linux":
        yield
        return
    adopted, before = ctypes.c_int(), child_pids(os.getpid())
    ctypes.CDLL(None).prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(adopted), 0, 0, 0)
    adopt_orphans()
    try:
        yield
    finally:
        kill_descendants(spared=before)
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, adopted.value, 0, 0, 0)


def child_pids(pid: int) -> set[int]:
    """The processes whose parent is `pid`, those that have ended and are not waited for included; none off Linux."""
    found: set[int] = set()
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended
            found |= {int(child) for child in path.read_text().split()}
    return found


def descendant_pids(pid: int) -> set[int]:
    """The children of a process, theirs, and so on."""
    found, following = set[int](), child_pids(pid)
    while following:
        found |= following
        following = {child for parent in following for child in child_pids(parent)} - found
    return found


def kill_descendants(spared: Container[int] = ()) -> None:
    """Kill every descendant of this process but those that are spared and theirs, and wait until they are gone.

    Needs `adopt_orphans`, without which descendants whose parents have ended are not found. Processes that keep count
    of shared memory are left time to remove it once those that use it are gone; this process's own stays.
    """
    began, own = time.monotonic(), resource_tracker_pids()
    while left := {pid for pid in child_pids(os.getpid()) - own if pid not in spared}:
        passed = time.monotonic() - began
        if passed > ENDING_SECONDS:
            return
        for pid in set.union(left, *(descendant_pids(pid) for pid in left)):
            if passed > TRACKER_SECONDS or not _is_tracker(pid):
                kill(pid)
            else:
                _reap(pid)
        time.sleep(0.01)


def resource_tracker_pids() -> set[int]:
    """The process that keeps count of this one's shared memory and semaphores: it ends, and removes them, after it."""
    tracker: int | None = getattr(resource_tracker._resource_tracker, "_pid", None)
    return set() if tracker is None else {tracker}


def _is_tracker(pid: int) -> bool:
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended
        return False


def kill(pid: int) -> None:
    """Kill a process, and wait for it where it is a child of this one and has ended."""
    with suppress(ProcessLookupError, PermissionError):  # one that has become another user's lives on
        os.kill(pid, signal.SIGKILL)
    _reap(pid)


def _reap(pid: int) -> None:
    with suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def reap_orphans() -> None:
    """Wait for adopted processes that have ended, which would stay in the table of processes.

    One counts that is seen so twice: what ended just now may be about to be waited for by the code that started it.
    """
    global _ended
    multiprocessing.active_children()  # waits for its own
    ended = {pid for pid in child_pids(os.getpid()) - resource_tracker_pids() if process_state(pid) == "Z"}
    for pid in ended & _ended:
        _reap(pid)
    _ended = ended


def proc_stat(pid: int) -> list[str]:
    """The fields of /proc/<pid>/stat from the third on (proc(5)); none where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def process_state(pid: int) -> str:
    """A letter, such as T of a process that is stopped (proc(5)); "" where there is none."""
    return (proc_stat(pid) or [""])[0]


def start_ticks(pid: int) -> str:
    """When a process started, in ticks since the machine did: with its number, that tells it from any other."""
    fields = proc_stat(pid)
    return fields[19] if len(fields) > 19 else ""


def set_shared_memory_prefix(run: str | None = None) -> None:
    """Have the segments and semaphores that Python makes in this process bear the name of the run.

    vLLM's message queues and the pools of rewards have names drawn at random otherwise, which nobody could tell from
    another run's. Processes that this one starts find the run's name in their environment.

    Args:
        run: its name; without it, that of the environment, if there is one.
    """
    if run is not None:
        os.environ[RUN] = run
    if not os.environ.get(RUN):
        return
    segments: Any = shared_memory  # which has no public setting for it
    segments._SHM_NAME_PREFIX = f"/psm_{os.environ[RUN]}_"
    segments._SHM_SAFE_NAME_LENGTH = len(segments._SHM_NAME_PREFIX) + 16
    this: Any = process.current_process()
    this._config["semprefix"] = f"/mp-{os.environ[RUN]}"


def remove_shared_memory(run: str) -> None:
    """Remove the segments and semaphores that a run which died left behind.

    Names are matched whole: that of another run may begin with this one's. What belongs to another user stays.
    """
    name = re.escape(run)
    own = re.compile(rf"psm_{name}_[0-9a-f]+|sem\.mp-{name}-\w{{8}}|{name}-[^-]+-\[[^\]]*\]-cpushm.*")
    for segment in SHARED_MEMORY.glob("*"):
        if own.fullmatch(segment.name):
            with suppress(OSError):
                segment.unlink()


@contextmanager
def shared_memory_cleanup(run: str) -> Iterator[None]:
    """At the end, remove all shared memory that bears the name of a run, even if this process is killed before."""
    command = [sys.executable, "-m", "hybrid3d.process", run]
    pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
    waiting = subprocess.Popen(command, stdin=pipe, stdout=nothing, stderr=nothing, start_new_session=True)
    try:
        yield
    finally:
        waiting.kill()
        waiting.communicate()
        remove_shared_memory(run)


def main(run: str) -> None:
    """Wait until whoever holds the other end of stdin has ended, and remove the shared memory of its run."""
    sys.stdin.read()
    time.sleep(DYING_SECONDS)
    remove_shared_memory(run)


if __name__ == "__main__":
    main(sys.argv[1])
