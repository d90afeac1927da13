"""Programs that nobody has read, run where they can do no harm, for a bounded time.

Each is a Python process of its own (`sandbox_child.py` says what it gives up): isolated, with an empty environment and
an empty folder, in a session that is killed as a whole. Limits of the kernel bound its memory, files and CPU seconds; a
filter of system calls (seccomp) refuses processes, sockets, files to write and signals to others; Landlock hides all
files but Python's library. `protection` says which of the last two this machine has.
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

from hybrid3d.rewards import code_judge, code_program
from hybrid3d.rewards.code_references import Tests

OUTPUT_BYTES = 2**20  # what a program may print
# Beside CPU seconds: address space and sizes of files in bytes, open files, processes, bytes of a core dump.
LIMITS = {"AS": 512 * 2**20, "FSIZE": 0, "NOFILE": 32, "NPROC": 0, "CORE": 0}
# What a program can do where the kernel, or what a container lets through of it, has no such thing.
UNCONFINED_RIGHTS = {"seccomp": "open sockets and signal processes", "landlock": "read files"}
_CHILD_SCRIPT = Path(__file__).with_name("sandbox_child.py")
_PACKAGE = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Outcome:
    """How a program ended.

    Attributes:
        finished: by itself, with exit code 0, within all limits.
        output: what it printed.
        holds: what confined it beside the limits: `seccomp`, `landlock`.
    """

    finished: bool
    output: bytes
    confined_by: tuple[str, ...]


@dataclass(frozen=True)
class Verdict:
    """What a judge reports of an answer.

    Attributes:
        passed: the tests ran to their end, and none failed.
        assertions: how many were run.
        requests: how often the answer was asked for something.
        problem: why the tests cannot be judged, or "".
    """

    passed: bool
    assertions: int = 0
    requests: int = 0
    problem: str = ""


def run(program: str, *, stdin: str = "", seconds: float) -> Outcome:
    """Run a program's source."""
    with _Child({"role": "program", "program": program}, seconds, stdin=stdin, prints=True) as child:
        printed = cast(BinaryIO, child.process.stdout).fileno()
        deadline = time.monotonic() + seconds
        closed, parts = _read_until(deadline, printed, child.report)
        finished = closed and child.ended(deadline)
    finished = finished and child.process.returncode == 0
    holds = parts[child.report].partition(b"\n")[0]
    return Outcome(finished, parts[printed], tuple(holds.decode(errors="replace").split()))


def judge(program: str, tests: Tests, *, seconds: float) -> Verdict:
    """Run tests in one process against what a program in another defines.

    The program sees the arguments of the calls that the tests make, and decides what they return; the tests, what
    they compare with and the verdict are out of its reach. A program that ends, closes its pipes or sends what is no
    value gets no further.
    """
    asked, asks = os.pipe()
    answered, answers = os.pipe()
    deadline = time.monotonic() + seconds
    with contextlib.ExitStack() as children:
        try:
            orders = {"role": code_program.__name__, "program": program, "incoming": asked, "outgoing": answers}
            children.enter_context(_Child(orders, seconds, pipes=(asked, answers)))
            orders = {"role": code_judge.__name__, "tests": asdict(tests), "incoming": answered, "outgoing": asks}
            child = children.enter_context(_Child(orders, seconds, pipes=(answered, asks)))
        finally:
            for end in (asked, asks, answered, answers):
                os.close(end)
        closed, parts = _read_until(deadline, child.report)
    said = parts[child.report].partition(b"\n")[2]
    return Verdict(**json.loads(said)) if closed and said else Verdict(passed=False)


class _Child:
    """A process in the sandbox, while it is used as a context; at the end it is killed, with all that it started."""

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
            with _temporary_file(json.dumps(orders)) as told, _temporary_file(stdin) as given:
                self.process = _start(told, given, prints, (report_end, *pipes))
        except BaseException:
            os.close(self.report)
            raise
        finally:
            os.close(report_end)

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)  # it is not waited for yet, so the number is still its own
        self.process.wait()
        os.close(self.report)
        if self.process.stdout is not None:
            self.process.stdout.close()

    def ended(self, deadline: float) -> bool:
        """Whether the process ends by itself before the deadline."""
        options = os.WEXITED | os.WNOWAIT | os.WNOHANG
        while (ended := os.waitid(os.P_PID, self.process.pid, options)) is None and time.monotonic() < deadline:
            time.sleep(0.001)
        return ended is not None


def _temporary_file(text: str) -> BinaryIO:
    """A file without a name, so that nothing is left of it whatever happens; at its beginning."""
    file = tempfile.TemporaryFile()  # noqa: SIM115  # whoever asked for it closes it
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
        os.rmdir(folder)  # it runs on in a folder without a name, in which nothing can be made


def _read_until(deadline: float, *descriptors: int) -> tuple[bool, dict[int, bytes]]:
    """Whether all were closed before the deadline and within the limit of output, and what could be read of each."""
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
    """What confines a program on this machine, found by starting one: `seccomp, landlock, limits`, or less."""
    return ", ".join([*run("", seconds=10.0).confined_by, "limits"])


def warning(confined_by: str) -> str:
    """What programs may do that are confined by no more than `holds`; "" where that is nothing."""
    missing = [f"without {name} they can {can}" for name, can in UNCONFINED_RIGHTS.items() if name not in confined_by]
    advice = "run where the kernel has it and a container allows it, and give a run no secrets to read"
    return f"programs of answers are confined by {confined_by} only: {', '.join(missing)}; {advice}" if missing else ""
