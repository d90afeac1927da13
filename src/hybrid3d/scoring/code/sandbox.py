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
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from hybrid3d.scoring.code import judge as code_judge
from hybrid3d.scoring.code import program as code_program

OUTPUT_BYTES = 2**20  # that a program may print
# Limits besides CPU seconds: address space and file sizes in bytes, open files, processes, bytes of a core dump.
LIMITS = {"AS": 512 * 2**20, "FSIZE": 0, "NOFILE": 32, "NPROC": 0, "CORE": 0}
# What a program can do if the kernel or the container does not support seccomp or Landlock.
UNCONFINED_RIGHTS = {"seccomp": "open sockets and signal processes", "landlock": "read files"}
_CHILD_SCRIPT = Path(__file__).with_name("sandbox_child.py")
_PACKAGE = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Outcome:
    """The result of a program, which has finished if it ended by itself, with exit code 0, within all limits."""

    finished: bool
    output: bytes
    confined_by: tuple[str, ...]  # besides the limits: seccomp, landlock


@dataclass(frozen=True)
class Tests:
    """Tests in Python, as the judge runs them."""

    sources: tuple[str, ...]  # run in order in one namespace
    names: Mapping[str, str]  # names in the tests for what the answer defines, and the answer's names for the same
    modules: tuple[str, ...] = ()  # of the standard library, which the tests use without importing them
    library_names: Mapping[str, str] | None = None  # names used without an import, and their standard library modules
    functions: tuple[str, ...] = ()  # called at the end without arguments, as pytest would


@dataclass(frozen=True)
class Verdict:
    """The judge's report on an answer, which has passed if all tests ran and none failed; the rest is as in `Judge`."""

    passed: bool
    assertions: int = 0
    requests: int = 0
    problem: str = ""


def run(program: str, *, stdin: str = "", seconds: float) -> Outcome:
    """Run the source of a program with this standard input."""
    with _child({"role": "program", "program": program}, seconds, stdin=stdin, prints=True) as (process, report):
        printed = cast(BinaryIO, process.stdout).fileno()
        deadline = time.monotonic() + seconds
        closed, parts = _read_until(deadline, printed, report)
        finished = closed and _ends(process, deadline)
    finished = finished and process.returncode == 0
    confined_by = parts[report].partition(b"\n")[0]
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
            children.enter_context(_child(orders, seconds, pipes=(requests_read, replies_write)))
            orders = {"role": code_judge.__name__, "tests": asdict(tests)}
            orders |= {"incoming": replies_read, "outgoing": requests_write}
            _, report = children.enter_context(_child(orders, seconds, pipes=(replies_read, requests_write)))
        finally:
            for descriptor in (requests_read, requests_write, replies_read, replies_write):
                os.close(descriptor)
        closed, parts = _read_until(deadline, report)
    verdict = parts[report].partition(b"\n")[2]
    return Verdict(**json.loads(verdict)) if closed and verdict else Verdict(passed=False)


@contextlib.contextmanager
def _child(
    orders: dict[str, Any], seconds: float, *, stdin: str = "", prints: bool = False, pipes: tuple[int, ...] = ()
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Yield a process in the sandbox and the descriptor of its report; kill it at the end with all that it started."""
    report, report_end = os.pipe()
    orders = orders | {
        "report": report_end,
        "package": str(_PACKAGE),
        "parent": os.getpid(),
        "limits": LIMITS | {"CPU": math.ceil(seconds) + 1},
    }
    try:
        with _temporary_file(json.dumps(orders)) as orders_file, _temporary_file(stdin) as stdin_file:
            process = _start(orders_file, stdin_file, prints, (report_end, *pipes))
    except BaseException:
        os.close(report)
        raise
    finally:
        os.close(report_end)
    try:
        yield process, report
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # its process id cannot be reused before the wait
        process.wait()
        os.close(report)
        if process.stdout is not None:
            process.stdout.close()


def _ends(process: subprocess.Popen[bytes], deadline: float) -> bool:
    """Wait until a process ends or the deadline; returns whether it has ended."""
    options = os.WEXITED | os.WNOWAIT | os.WNOHANG
    while (ended := os.waitid(os.P_PID, process.pid, options)) is None and time.monotonic() < deadline:
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
