"""How long processes live: no longer than the one that began them, and with them whatever they began."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Container
from contextlib import suppress
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
ENDING_SECONDS = 10  # in which a process that SIGKILL was sent to is gone, unless a device holds it


def die_with(parent: int) -> None:
    """Have this process, which `parent` has just started, be killed when that ends (Linux: PR_SET_PDEATHSIG)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it has ended already
            os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends, daemons too (Linux: PR_SET_CHILD_SUBREAPER)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children_of(pid: int) -> set[int]:
    """The processes whose parent is `pid`, those that have ended and are not waited for included; none off Linux."""
    found: set[int] = set()
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended
            found |= {int(child) for child in path.read_text().split()}
    return found


def descendants_of(pid: int) -> set[int]:
    """The children of a process, theirs, and so on."""
    found, following = set[int](), children_of(pid)
    while following:
        found |= following
        following = {child for parent in following for child in children_of(parent)} - found
    return found


def end_descendants(spared: Container[int] = ()) -> None:
    """Kill every descendant of this process but those that are spared and theirs, and wait until they are gone.

    Needs `adopt_orphans`, without which descendants whose parents have ended are not found.
    """
    end = time.monotonic() + ENDING_SECONDS
    while (left := {pid for pid in children_of(os.getpid()) if pid not in spared}) and time.monotonic() < end:
        for pid in set.union(left, *(descendants_of(pid) for pid in left)):
            kill(pid)
        time.sleep(0.01)


def kill(pid: int) -> None:
    """Kill a process, and wait for it where it is a child of this one and has ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    with suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
