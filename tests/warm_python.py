"""The servers of warm processes of a test session: started with the first process, ended with the session."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
HASH_SEEDS = ("1", "2")  # a server each, so that ranks disagree where something depends on the order of a set


@functools.cache
def executable() -> str:
    """Return the path of a program that replaces `python`: it runs hybrid3d in a process with imported engines.

    On a machine with GPUs it is `python` itself, because CUDA does not survive a fork.
    """
    if torch.cuda.is_available():
        return sys.executable
    folder = Path(tempfile.mkdtemp(prefix="warm-"))
    program = folder / "python"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {HERE / "warm_client.py"} {program} {folder} "$@"\n')
    program.chmod(0o755)
    shared = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    servers = []
    for seed in HASH_SEEDS:
        path = folder / seed
        environment = os.environ | shared | {"PYTHONPATH": str(HERE.parent / "src"), "PYTHONHASHSEED": seed}
        command = [sys.executable, str(HERE / "warm_server.py"), str(path)]
        with (folder / f"{seed}.log").open("wb") as log:
            servers.append(subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=log, stderr=log))
        path.with_suffix(".server").touch()
    atexit.register(_stop, servers, folder)
    return str(program)


def _stop(servers: list[subprocess.Popen[bytes]], folder: Path) -> None:
    for server in servers:
        server.communicate()  # closes its standard input
    shutil.rmtree(folder)
