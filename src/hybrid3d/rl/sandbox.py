"""Programs that nobody has read, run where they can do no harm, for a bounded time.

Each is a Python process of its own (`sandboxed.py` says what it gives up): isolated, with an empty environment and an
empty folder, in a session that is killed as a whole. Limits of the kernel bound its memory, files and CPU seconds; a
filter of system calls (seccomp) refuses processes, sockets, files to write and signals to others; Landlock hides all
files but Python's library. `protection` says which of the last two this machine has.
"""

from __future__ import annotations

import functools
import json
import math
import os
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

OUTPUT_BYTES = 2**20  # what a program may print
# Beside CPU seconds: address space and sizes of files in bytes, open files, processes, bytes of a core dump.
LIMITS = {"AS": 512 * 2**20, "FSIZE": 0, "NOFILE": 32, "NPROC": 0, "CORE": 0}
# What a program can do where the kernel, or what a container lets through of it, has no such thing.
OTHERWISE = {"seccomp": "open sockets and signal processes", "landlock": "read files"}
_INSIDE = Path(__file__).with_name("sandboxed.py")


@dataclass(frozen=True)
class Outcome:
    """How a program ended.

    Attributes:
        finished: by itself, with exit code 0, within all limits.
        passed: the tests that came with it ran to their end.
        output: what it printed.
        holds: what confined it beside the limits: `seccomp`, `landlock`.
    """

    finished: bool
    passed: bool
    output: bytes
    holds: tuple[str, ...]


def run(program: str, *, stdin: str = "", tests: str | None = None, seconds: float) -> Outcome:
    """Run a program's source, and after it, in the same interpreter, the source of its tests.

    The tests show that they ran to their end by a random token, which lies in a pipe until then. A program that ends
    early, prints or replaces builtins has not got it; one that knows this file and wants to cheat can read it, because
    nothing in one interpreter is out of reach of anything else in it. Judge by output where that matters.
    """
    token = secrets.token_hex(16).encode()
    report, report_end = os.pipe()
    ask_end, ask = os.pipe()
    os.write(ask, token)
    os.close(ask)
    orders = {
        "program": program,
        "tests": tests,
        "report": report_end,
        "ask": ask_end,
        "parent": os.getpid(),
        "limits": LIMITS | {"CPU": math.ceil(seconds) + 1},
    }
    try:
        with _holding(json.dumps(orders)) as told, _holding(stdin) as given:
            process = _start(told, given, (report_end, ask_end))
    finally:
        os.close(report_end)
        os.close(ask_end)
    try:
        finished, output, said = _watch(process, report, time.monotonic() + seconds)
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # it is not waited for yet, so the number is still its own
        code = process.wait()
        os.close(report)
        cast(BinaryIO, process.stdout).close()
    finished = finished and code == 0
    holds, _, shown = said.partition(b"\n")
    return Outcome(finished, finished and shown == token, output, tuple(holds.decode(errors="replace").split()))


def _holding(text: str) -> BinaryIO:
    """A file without a name, so that nothing is left of it whatever happens; at its beginning."""
    file = tempfile.TemporaryFile()  # noqa: SIM115  # whoever asked for it closes it
    file.write(text.encode(errors="replace"))
    file.seek(0)
    return file


def _start(orders: BinaryIO, stdin: BinaryIO, ends: tuple[int, int]) -> subprocess.Popen[bytes]:
    folder = tempfile.mkdtemp(prefix="sandbox-")
    try:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", str(_INSIDE), str(orders.fileno())],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=(*ends, orders.fileno()),
            cwd=folder,
            env={"PYTHONIOENCODING": "utf-8"},
            start_new_session=True,
        )
    finally:
        os.rmdir(folder)  # it runs on in a folder without a name, in which nothing can be made


def _watch(process: subprocess.Popen[bytes], report: int, deadline: float) -> tuple[bool, bytes, bytes]:
    """Whether the process ended by itself before the deadline, what it printed and what it reported."""
    printed = cast(BinaryIO, process.stdout).fileno()
    parts = {printed: bytearray(), report: bytearray()}
    with selectors.DefaultSelector() as selector:
        for descriptor in parts:
            selector.register(descriptor, selectors.EVENT_READ)
        while selector.get_map():
            left = deadline - time.monotonic()
            if left <= 0 or any(len(part) > OUTPUT_BYTES for part in parts.values()):
                return False, bytes(parts[printed]), bytes(parts[report])
            for key, _ in selector.select(left):
                data = os.read(key.fd, 65536)
                parts[key.fd] += data
                if not data:
                    selector.unregister(key.fd)
    ended = os.WEXITED | os.WNOWAIT | os.WNOHANG
    while os.waitid(os.P_PID, process.pid, ended) is None and time.monotonic() < deadline:
        time.sleep(0.001)
    return os.waitid(os.P_PID, process.pid, ended) is not None, bytes(parts[printed]), bytes(parts[report])


@functools.cache
def protection() -> str:
    """What confines a program on this machine, found by starting one: `seccomp, landlock, limits`, or less."""
    return ", ".join([*run("", seconds=10.0).holds, "limits"])


def warning(holds: str) -> str:
    """What programs may do that are confined by no more than `holds`; "" where that is nothing."""
    missing = [f"without {name} they can {can}" for name, can in OTHERWISE.items() if name not in holds]
    advice = "run where the kernel has it and a container allows it, and give a run no secrets to read"
    return f"programs of answers are confined by {holds} only: {', '.join(missing)}; {advice}" if missing else ""
