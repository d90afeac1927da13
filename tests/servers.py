"""Starts `hybrid3d serve` and waits until it answers; free ports."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

START_SECONDS = 240
OPTIONS = ("--dtype", "float32", "--max-model-len", "128", "--kv-cache-memory-bytes", str(2**27))


@contextlib.contextmanager
def serving(checkpoint: Path, log: Path, *options: str) -> Iterator[str]:
    """Serve a checkpoint within the context, which is given the address of the API."""
    port = free_port()
    command = [sys.executable, "-m", "hybrid3d", "serve", str(checkpoint), "--port", str(port), "--"]
    with log.open("w") as out:
        server = subprocess.Popen([*command, *OPTIONS, *options], stdout=out, stderr=out, start_new_session=True)
    try:
        wait_until_healthy(f"http://127.0.0.1:{port}", server, log)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, 9)
            raise


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


@functools.cache
def free_ports_in_a_row(count: int) -> int:
    """Return the first of so many free ports, always the same; neither the kernel nor another worker takes one of them.

    Runs whose agents listen at ports of the recipe may then run in two workers, and be resumed with the same recipe.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 2
    for first in random.sample(range(20_000 + 5_000 * worker, 25_000 + 5_000 * worker, count), 100):
        try:
            for port in range(first, first + count):
                with socket.create_server(("127.0.0.1", port)):
                    pass
            return first
        except OSError:
            continue
    raise RuntimeError(f"no {count} ports in a row are free")


def wait_until_healthy(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and server.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise AssertionError(f"the server has not started (exit code {server.poll()}):\n{log.read_text()[-3000:]}")
