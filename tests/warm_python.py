"""The servers of warm processes of a test session.

The first process that needs them starts them, and they end with the last one that has asked for them.
"""

from __future__ import annotations

import fcntl
import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
HASH_SEEDS = ("1", "2")  # a server each, so that ranks disagree where something depends on the order of a set
SERVERS: list[subprocess.Popen[bytes]] = []


@functools.cache
def executable() -> str:
    """Return the path of a program that replaces `python`: it runs hybrid3d in a process with imported engines.

    On a machine with GPUs it is `python` itself, because CUDA does not survive a fork.
    """
    if torch.cuda.is_available():
        return sys.executable
    folder = _folder()
    program, alive = folder / "python", folder / "alive"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        first = not alive.exists()
        if first:
            os.mkfifo(alive)
        # Open for as long as this process is there. When no process has it open the servers, which read it, end
        os.open(alive, os.O_RDWR)
        if first:
            program.write_text(
                f'#!/bin/sh\nexec {sys.executable} -I -S {HERE / "warm_client.py"} {program} {folder} "$@"\n'
            )
            program.chmod(0o755)
            _start(folder, alive)
    return str(program)


def _folder() -> Path:
    """Return the folder of the servers, which the processes of one session of pytest-xdist share."""
    session = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if session is None:
        return Path(tempfile.mkdtemp(prefix="warm-"))
    folder = Path(f"/tmp/warm-{session}")  # sockets have short paths
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _start(folder: Path, alive: Path) -> None:
    shared = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    for seed in HASH_SEEDS:
        path = folder / seed
        environment = os.environ | shared | {"PYTHONPATH": str(HERE.parent / "src"), "PYTHONHASHSEED": seed}
        command = [sys.executable, str(HERE / "warm_server.py"), str(path)]
        with (folder / f"{seed}.log").open("wb") as log, alive.open("rb", buffering=0) as standard_input:
            streams = {"stdin": standard_input, "stdout": log, "stderr": log}
            # Not ended by Ctrl-C, but when no process has `alive` open any more
            SERVERS.append(subprocess.Popen(command, env=environment, start_new_session=True, **streams))
        path.with_suffix(".server").touch()
