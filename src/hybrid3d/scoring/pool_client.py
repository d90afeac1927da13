"""Calls a user's functions in separate processes, so that none of them can stop a run."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import BinaryIO

from hybrid3d.process import kill_descendants_on_exit
from hybrid3d.scoring.pool_worker import START_SECONDS, CallResult, Item, ReturnKind

GRACE_SECONDS = 5  # for the server to end by itself
STDERR_TAIL_BYTES = 65_536  # of the stderr of a function's module that are read for its error message
# The server gets this process's sys.path, so that it can import the same modules, this package included.
_SERVER = (
    "import sys; sys.path[:] = eval(sys.argv[1]); from hybrid3d.scoring import pool_server as s; s.main(*sys.argv[2:])"
)


class ProcessPoolClient:
    """Calls one function, `module:function`, in `workers` processes, which start with the first call.

    A call must return what `return_kind` says, within `seconds`.
    """

    def __init__(self, target: str, return_kind: ReturnKind, workers: int, seconds: float):
        self._target, self._return_kind, self._workers, self._seconds = target, return_kind, workers, seconds
        self._server: tuple[subprocess.Popen[bytes], Connection] | None = None

    def call(self, items: Sequence[Item]) -> list[CallResult]:
        """Call the function for each item; returns the results in order.

        The pool's server enforces the limit of each call, and sends an empty list whenever some have ended. The limit
        here, of the time between two messages, only detects a server that hangs itself: it has room for its start and
        that of a worker, and for a call.
        """
        if not items:
            return []
        limit = 2 * START_SECONDS + self._seconds
        process, connection = self._ensure_server()
        try:
            connection.send(list(items))
            while connection.poll(limit):
                results: list[CallResult] = connection.recv()
                if results:
                    return results
            failure: CallResult = (None, "hung", f"the pool's server did not reply within {limit:g} s")
            process.kill()
        except (EOFError, ConnectionError):
            failure = (None, "died", f"the pool's server ended with exit code {process.wait()}")
        self.close()
        return [failure] * len(items)

    def kill(self) -> None:
        """End all processes during a call of another thread, which then returns that they died."""
        server = self._server
        if server is not None:
            server[0].kill()

    def close(self) -> None:
        """End all processes; the next call starts them again."""
        if self._server is None:
            return
        process, connection = self._server
        self._server = None
        connection.close()
        try:
            process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()  # its workers and their semaphores go with it
            process.wait()

    def _ensure_server(self) -> tuple[subprocess.Popen[bytes], Connection]:
        if self._server is not None and self._server[0].poll() is not None:
            self.close()  # it ended between two batches
        if self._server is None:
            client_end, server_end = multiprocessing.Pipe()
            descriptor, limits = server_end.fileno(), (str(self._workers), str(self._seconds))
            arguments = ["serve", str(descriptor), self._target, self._return_kind, *limits]
            self._server = _start(arguments, descriptor), client_end  # its stderr goes to the log
            server_end.close()
        return self._server


def _start(arguments: Sequence[str], descriptor: int, errors: BinaryIO | None = None) -> subprocess.Popen[bytes]:
    """Start a server, which gets this descriptor, and whose stderr is `errors` or this process's."""
    return subprocess.Popen(
        [sys.executable, "-c", _SERVER, repr(sys.path), *arguments],
        pass_fds=[descriptor],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,  # discards what functions and modules print
        stderr=errors,
        start_new_session=True,  # only the trainer handles Ctrl-C
    )


def load_in_subprocess(spec: str, target: str, return_kind: ReturnKind, what: str) -> tuple[str, ...]:
    """Load a function in a separate process, because importing a user's module runs its code; return its stops.

    These are empty if it is no environment. Messages call it `what` ("reward" or "environment") and, as the recipe
    does, `spec`.

    Raises:
        ValueError: the module or function does not exist, or cannot be loaded or called; says why.
    """
    with (
        tempfile.TemporaryFile() as answer,
        tempfile.TemporaryFile() as errors,  # not pipes, which the process's children would keep open
        kill_descendants_on_exit(),
    ):
        process = _start(["check", target, return_kind, str(answer.fileno())], answer.fileno(), errors)
        try:
            code = process.wait(START_SECONDS)
        except subprocess.TimeoutExpired:
            raise ValueError(f"{what} {spec!r} does not load within {START_SECONDS} s") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        answer.seek(0)
        stops = answer.read()
        errors.seek(max(0, errors.seek(0, os.SEEK_END) - STDERR_TAIL_BYTES))
        error_lines = errors.read().decode(errors="replace").strip().splitlines()
    if code == 0 and stops:
        return tuple(json.loads(stops))
    ended = f"its process ended with exit code {code}" + ("" if code else ", before it had loaded")
    raise ValueError(f"{what} {spec!r} does not load: {error_lines[-1] if code and error_lines else ended}")
