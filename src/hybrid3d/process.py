"""Lifetimes of processes and shared memory: they must not outlive the process, or the run, that created them.

A process that runs a rank may be the child of one that starts it again, which it tells that it is alive.
"""

from __future__ import annotations

import ctypes
import functools
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Container, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import process, resource_tracker, shared_memory
from pathlib import Path
from typing import Any

from hybrid3d.launch_environment import BEAT_SECONDS, KILL_SECONDS, PARENT, RUN, State

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 1, 36, 37  # of prctl(2)
RANKS_EXIT_SECONDS = 1.0  # within which the ranks of a killed launcher have exited
SHARED_MEMORY = Path("/dev/shm")
RESTART_COUNT, FAILURE = "HYBRID3D_RESTART_COUNT", "HYBRID3D_RESTART_FAILURE"
MAX_FAILURE_TEXT = 1000  # characters of a reason that are kept
TRACKER_SECONDS = 2  # within which a resource tracker of multiprocessing exits by itself

_zombies: set[int] = set()  # found by the last `reap_orphans`


def kill_when_parent_exits(parent: int | None = None) -> None:
    """Make the kernel kill this process when the one that has started it exits (PR_SET_PDEATHSIG).

    Args:
        parent: who has started it; None for the one that the environment names, once, or else its parent by now.
    """
    if parent is None:
        parent = int(os.environ.pop(PARENT, os.getppid()))
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has exited already
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of all descendants whose own parent exits, daemons too (PR_SET_CHILD_SUBREAPER)."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


@contextmanager
def kill_descendants_on_exit() -> Iterator[None]:
    """On exit, kill every process that was started in the context and still runs, even if detached from its parent."""
    was_subreaper, existing = ctypes.c_int(), child_pids(os.getpid())
    ctypes.CDLL(None).prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(was_subreaper), 0, 0, 0)
    adopt_orphans()
    try:
        yield
    finally:
        kill_descendants(keep=existing)
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, was_subreaper.value, 0, 0, 0)


def child_pids(pid: int) -> set[int]:
    """Return the child processes of `pid`, including zombies."""
    children: set[int] = set()
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # the thread has exited
            children |= {int(child) for child in path.read_text(encoding="utf-8").split()}
    return children


def descendant_pids(pid: int) -> set[int]:
    """Return the children of a process, their children, and so on."""
    descendants, generation = set[int](), child_pids(pid)
    while generation:
        descendants |= generation
        generation = {child for parent in generation for child in child_pids(parent)} - descendants
    return descendants


def kill_descendants(keep: Container[int] = ()) -> None:
    """Kill all descendants of this process except the children in `keep` and theirs, and wait until they have exited.

    Requires `adopt_orphans`, without which descendants whose parents have exited are not found. Resource trackers of
    multiprocessing get time to remove shared memory after its users have exited; that of this process is not killed.
    """
    start, own_tracker = time.monotonic(), resource_tracker_pids()
    while remaining := {pid for pid in child_pids(os.getpid()) - own_tracker if pid not in keep}:
        elapsed = time.monotonic() - start
        if elapsed > KILL_SECONDS:  # a device blocks them
            return
        for pid in set.union(remaining, *(descendant_pids(pid) for pid in remaining)):
            if elapsed > TRACKER_SECONDS or not is_resource_tracker(pid):
                kill(pid)
            else:
                _reap(pid)
        time.sleep(0.01)


def resource_tracker_pids() -> set[int]:
    """Return the pid of this process's resource tracker, if any, which removes its shared memory at exit."""
    tracker: int | None = getattr(resource_tracker._resource_tracker, "_pid", None)
    return set() if tracker is None else {tracker}


def is_resource_tracker(pid: int) -> bool:
    """Return whether a process is a resource tracker of multiprocessing."""
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has exited
        return False


def kill(pid: int) -> None:
    """Kill a process, and reap it if it is a child of this one and has exited."""
    with suppress(ProcessLookupError, PermissionError):  # a process that changed its user cannot be killed
        os.kill(pid, signal.SIGKILL)
    _reap(pid)


def _reap(pid: int) -> None:
    with suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def reap_orphans() -> None:
    """Reap adopted processes that have exited, so that they do not fill the process table.

    Only zombies that the previous call has found too are reaped, because the code that started a process may be about
    to wait for one that has just exited.
    """
    global _zombies
    multiprocessing.active_children()  # reaps those of multiprocessing
    zombies = {pid for pid in child_pids(os.getpid()) - resource_tracker_pids() if process_state(pid) == "Z"}
    for pid in zombies & _zombies:
        _reap(pid)
    _zombies = zombies


def proc_stat(pid: int) -> list[str]:
    """Return the fields of /proc/<pid>/stat from the third on (proc(5)); empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return []


def process_state(pid: int) -> str:
    """Return the state of a process as a letter, such as T for stopped (proc(5)); empty if it does not exist."""
    return (proc_stat(pid) or [""])[0]


def start_ticks(pid: int) -> str:
    """Return the start time of a process in ticks since boot, which together with its pid identifies it uniquely."""
    fields = proc_stat(pid)
    return fields[19] if len(fields) > 19 else ""


def set_shared_memory_prefix(run: str | None = None) -> None:
    """Put the run's id into the names of shared memory segments and semaphores that Python creates in this process.

    Otherwise vLLM's message queues and the reward pools have random names, which cannot be told from those of other
    runs. Child processes inherit the run's id through the environment, from which it is taken if `run` is None.
    """
    if run is not None:
        os.environ[RUN] = run
    if not os.environ.get(RUN):
        return
    segments: Any = shared_memory  # has no public setting for it
    segments._SHM_NAME_PREFIX = f"/psm_{os.environ[RUN]}_"
    segments._SHM_SAFE_NAME_LENGTH = len(segments._SHM_NAME_PREFIX) + 16
    current: Any = process.current_process()
    current._config["semprefix"] = f"/mp-{os.environ[RUN]}"


def engine_name(run: str, first_rank: int, restart_count: int) -> str:
    """Return the name that the shared memory of one start of an engine, or of a group of ranks, is named after."""
    return f"{run}.engine-{first_rank}-{restart_count}"


def new_engine_name(run: str, first_rank: int, restart_count: int) -> str:
    """Return `engine_name`, after removing the shared memory that the start before has left behind."""
    if restart_count:
        remove_shared_memory(engine_name(run, first_rank, restart_count - 1))
    return engine_name(run, first_rank, restart_count)


def remove_shared_memory(run: str, engines: bool = True) -> None:
    """Remove the shared memory segments and semaphores that a killed run, or one start of an engine, has left behind.

    Names must match completely, because the id of another run may start with this one. Those of other users stay, and
    so do those of a run's engines, and of ranks that do not train, unless `engines` is true.
    """
    name = re.escape(run) + (r"(\.engine-\d+-\d+)?" if engines else "")
    pattern = re.compile(rf"psm_{name}_[0-9a-f]+|sem\.mp-{name}-\w{{8}}|{name}-[^-]+-\[[^\]]*\]-cpushm.*")
    for segment in SHARED_MEMORY.glob("*"):
        if pattern.fullmatch(segment.name):
            with suppress(OSError):
                segment.unlink()


@contextmanager
def shared_memory_cleanup(run: str) -> Iterator[None]:
    """On exit, remove all shared memory of a run; a helper process does so even if this process is killed."""
    command = [sys.executable, "-m", "hybrid3d.process", run]
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    helper = subprocess.Popen(command, stdin=pipe, stdout=null, stderr=null, start_new_session=True)
    try:
        yield
    finally:
        helper.kill()
        helper.communicate()
        remove_shared_memory(run)


class ChildProcess:
    """This process as the child that runs a rank; where the rank has no such parent, nothing is told.

    It is made before standard output becomes the rank's log.
    """

    def __init__(self) -> None:
        self.restart_count = int(os.environ.get(RESTART_COUNT, 0))  # how many times the rank was started before
        self.failure = os.environ.get(FAILURE, "")  # why the process before this one ended; empty if this is the first
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


def is_child() -> bool:
    """Return whether this process was started by one that starts its rank again."""
    return RESTART_COUNT in os.environ


@functools.cache
def this_process() -> ChildProcess:
    """Return this process as the child that runs a rank; from the first call on it tells that it is alive."""
    return ChildProcess()


if __name__ == "__main__":
    # Wait until the process at the other end of stdin has exited, and remove the shared memory of its run
    sys.stdin.read()
    time.sleep(RANKS_EXIT_SECONDS)
    remove_shared_memory(sys.argv[1])
