"""Runs untrusted programs in a sandbox, with a time limit.

Each program runs in its own isolated Python process (`sandbox_child.py` gives up the process's rights), with an empty
environment and an empty folder, in a session that is killed as a whole. Resource limits bound its memory, files and CPU
seconds; a system call filter (seccomp) refuses new processes, sockets, writing to files and signals to other processes;
Landlock hides all files but Python's library. `protection` says which of the last two this machine supports.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from hybrid3d.scoring.code import judge as code_judge
from hybrid3d.scoring.code import program as code_program
from hybrid3d.scoring.code.references import Tests

OUTPUT_BYTES = 2**20  # that a program may print
# Limits besides CPU seconds: address space and file sizes in bytes, open files, processes, bytes of a core dump.
LIMITS = {"AS": 512 * 2**20, "FSIZE": 0, "NOFILE": 32, "NPROC": 0, "CORE": 0}
# What a program can do if the kernel or the container does not support seccomp or Landlock.
UNCONFINED_RIGHTS = {"seccomp": "open sockets and signal processes", "landlock": "read files"}
_CHILD_SCRIPT = Path(__file__).with_name("sandbox_child.py")
_PACKAGE = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Outcome:
    """Holds the result of a program.

    Attributes:
        finished: whether it ended by itself, with exit code 0, within all limits.
        output: what it printed.
        confined_by: what confined it besides the limits: `seccomp`, `landlock`.
    """

    finished: bool
    output: bytes
    confined_by: tuple[str, ...]


@dataclass(frozen=True)
class Verdict:
    """Holds the judge's report on an answer.

    Attributes:
        passed: whether all tests ran and none failed.
        assertions: number of assertions that were run.
        requests: number of requests sent to the answer.
        problem: why the reference cannot be judged, or "".
    """

    passed: bool
    assertions: int = 0
    requests: int = 0
    problem: str = ""


def run(program: str, *, stdin: str = "", seconds: float) -> Outcome:
    """Run the source of a program with this standard input."""
    with _Child({"role": "program", "program": program}, seconds, stdin=stdin, prints=True) as child:
        printed = cast(BinaryIO, child.process.stdout).fileno()
        deadline = time.monotonic() + seconds
        closed, parts = _read_until(deadline, printed, child.report)
        finished = closed and child.ended(deadline)
    finished = finished and child.process.returncode == 0
    confined_by = parts[child.report].partition(b"\n")[0]
    return Outcome(finished, parts[printed], tuple(confined_by.decode(errors="replace").split()))


def judge(program: str, tests: Tests, *, seconds: float) -> Verdict:
    """Run tests in one process against a program in another.

    The program sees the arguments of the tests' calls and determines what they return. It cannot reach the tests, the
    expected values or the verdict. It fails if it ends, closes its pipes or sends an invalid value.
    """
    requests_read, requests_write = os.pipe()
    replies_read, replies_write = os.pipe()
    deadline = time.monotonic() + seconds
    with contextlib.ExitStack() as children:
        try:
            orders: dict[str, Any] = {"role": code_program.__name__, "program": program}
            orders |= {"incoming": requests_read, "outgoing": replies_write}
            children.enter_context(_Child(orders, seconds, pipes=(requests_read, replies_write)))
            orders = {"role": code_judge.__name__, "tests": asdict(tests)}
            orders |= {"incoming": replies_read, "outgoing": requests_write}
            child = children.enter_context(_Child(orders, seconds, pipes=(replies_read, requests_write)))
        finally:
            for descriptor in (requests_read, requests_write, replies_read, replies_write):
                os.close(descriptor)
        closed, parts = _read_until(deadline, child.report)
    verdict = parts[child.report].partition(b"\n")[2]
    return Verdict(**json.loads(verdict)) if closed and verdict else Verdict(passed=False)


class _Child:
    """A context manager for a process in the sandbox, which is killed at the end with all processes that it started."""

    def __init__(
        self,
        orders: dict[str, Any],
        seconds: float,
        *,
        stdin: str = "",
        prints: bool = False,
        pipes: tuple[int, ...] = (),
    ):
        self.report, report_end = os.pipe()
        orders = orders | {
            "report": report_end,
            "package": str(_PACKAGE),
            "parent": os.getpid(),
            "limits": LIMITS | {"CPU": math.ceil(seconds) + 1},
        }
        try:
            with _temporary_file(json.dumps(orders)) as orders_file, _temporary_file(stdin) as stdin_file:
                self.process = _start(orders_file, stdin_file, prints, (report_end, *pipes))
        except BaseException:
            os.close(self.report)
            raise
        finally:
            os.close(report_end)

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)  # its process id cannot be reused before the wait
        self.process.wait()
        os.close(self.report)
        if self.process.stdout is not None:
            self.process.stdout.close()

    def ended(self, deadline: float) -> bool:
        """Wait until the process ends or the deadline; returns whether it has ended."""
        options = os.WEXITED | os.WNOWAIT | os.WNOHANG
        while (ended := os.waitid(os.P_PID, self.process.pid, options)) is None and time.monotonic() < deadline:
            time.sleep(0.001)
        return ended is not None


def _temporary_file(text: str) -> BinaryIO:
    """Return an unnamed file with this content, positioned at its start; nothing is left of it after a crash."""
    file = tempfile.TemporaryFile()  # noqa: SIM115  # the caller closes it
    file.write(text.encode(errors="replace"))
    file.seek(0)
    return file


def _start(orders: BinaryIO, stdin: BinaryIO, prints: bool, ends: tuple[int, ...]) -> subprocess.Popen[bytes]:
    folder = tempfile.mkdtemp(prefix="sandbox-")
    try:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", str(_CHILD_SCRIPT), str(orders.fileno())],
            stdin=stdin,
            stdout=subprocess.PIPE if prints else subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(*ends, orders.fileno()),
            cwd=folder,
            env={"PYTHONIOENCODING": "utf-8"},
            start_new_session=True,
        )
    finally:
        os.rmdir(folder)  # the process's folder is deleted, so nothing can be created in it


def _read_until(deadline: float, *descriptors: int) -> tuple[bool, dict[int, bytes]]:
    """Read until all are closed, the deadline, or over `OUTPUT_BYTES`; returns whether all closed, and the data."""
    parts = {descriptor: bytearray() for descriptor in descriptors}
    with selectors.DefaultSelector() as selector:
        for descriptor in parts:
            selector.register(descriptor, selectors.EVENT_READ)
        while selector.get_map():
            left = deadline - time.monotonic()
            if left <= 0 or any(len(part) > OUTPUT_BYTES for part in parts.values()):
                break
            for key, _ in selector.select(left):
                data = os.read(key.fd, 65536)
                parts[key.fd] += data
                if not data:
                    selector.unregister(key.fd)
        closed = not selector.get_map()
    return closed, {descriptor: bytes(part) for descriptor, part in parts.items()}


@functools.cache
def protection() -> str:
    """Return what confines a program on this machine, by starting one: `seccomp, landlock, limits`, or fewer."""
    return ", ".join([*run("", seconds=10.0).confined_by, "limits"])


def warning(confined_by: str) -> str:
    """Return a warning about what programs can do that only `confined_by` confines; "" if nothing is missing."""
    missing = [f"without {name} they can {can}" for name, can in UNCONFINED_RIGHTS.items() if name not in confined_by]
    advice = "run where the kernel and the container support it, and keep secrets out of reach of a run"
    return f"answers' programs are confined by {confined_by} only: {', '.join(missing)}; {advice}" if missing else ""
