"""Starts a command as several ranks on this machine, waits for them, and ends them together.

The ranks meet at a store in this process, which listens on this machine's loopback interface alone.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from hybrid3d.distributed import host_store
from hybrid3d.errors import UserMistake
from hybrid3d.launch.rendezvous import why_not
from hybrid3d.launch_environment import ANSWER_SECONDS, END_SECONDS, LOOPBACK, PARENT

POLL_SECONDS = 0.1
ASYNC_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


def run_ranks(command: Sequence[str], world_size: int, restarts: Mapping[int, int] | None = None) -> dict[int, int]:
    """Run a command as so many ranks until all have ended or one has failed, which ends the others.

    Args:
        restarts: how often a rank is started again after it was killed, for those that others can do without.

    Returns:
        The exit code of each rank that failed, negative for a signal; those that failed first are the first.

    Raises:
        UserMistake: this machine has no loopback interface.
    """
    _check_loopback()
    store = host_store(LOOPBACK)
    left = dict(restarts or {})
    processes: dict[int, subprocess.Popen[bytes]] = {}
    try:
        for rank in range(world_size):
            processes[rank] = _start(command, rank, world_size, store.port)
        while True:
            failed = {rank: process.returncode for rank, process in processes.items() if process.poll()}
            for rank, code in list(failed.items()):
                if code < 0 and left.get(rank, 0) > 0:
                    left[rank] -= 1
                    processes[rank] = _start(command, rank, world_size, store.port)
                    del failed[rank]
            if failed or all(process.poll() == 0 for process in processes.values()):
                break
            time.sleep(POLL_SECONDS)
    finally:
        _end(list(processes.values()))
    codes = {rank: process.returncode for rank, process in processes.items()}
    return {rank: codes[rank] for rank in [*failed, *codes] if codes[rank]}


def _check_loopback() -> None:
    try:
        with socket.create_server((LOOPBACK, 0)) as server:
            socket.create_connection(server.getsockname(), ANSWER_SECONDS).close()
    except OSError as error:
        fix = "its ranks meet there: ip link set lo up (as root)"
        raise UserMistake(f"no connection to {LOOPBACK} of this machine ({why_not(error)}): {fix}") from None


def _start(command: Sequence[str], rank: int, world_size: int, port: int) -> subprocess.Popen[bytes]:
    """Start a rank, with the variables that torchrun would set."""
    of_rank = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    store = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    store |= {PARENT: os.getpid(), "TORCHELASTIC_RESTART_COUNT": 0}
    more = {**of_rank, **store, ASYNC_ERRORS: os.environ.get(ASYNC_ERRORS, 1)}
    variables = os.environ | {name: str(value) for name, value in more.items()}
    return subprocess.Popen(command, env=variables, start_new_session=True)  # Ctrl-C is for this process


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Tell processes to end, and kill them, and what they have started, if they do not."""
    running = [process for process in processes if process.poll() is None]
    for process in running:
        _signal(process, signal.SIGTERM)
    end = time.monotonic() + END_SECONDS
    for process in running:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, end - time.monotonic()))
    for process in running:
        if process.poll() is None:
            _signal(process, signal.SIGKILL)
            process.wait()


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)
