"""Writes the C stacks of this process to its log, by a debugger that is installed: py-spy or gdb."""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import subprocess
import sys

logger = logging.getLogger(__name__)

SECONDS = 20  # for which the process may be stopped: less than a heartbeat's timeout
FRAMES = 40  # of each thread, the innermost ones
PR_SET_PTRACER, ANY = 0x59616D61, -1  # of prctl(2)


def write_native_stacks() -> None:
    """Write the stacks of all threads to stderr; this process is stopped meanwhile, and goes on afterwards."""
    pid = str(os.getpid())
    if shutil.which("py-spy"):
        command = ["py-spy", "dump", "--native", "--pid", pid]
    elif shutil.which("gdb"):
        command = ["gdb", "-p", pid, "-batch", "-nx", "-ex", f"thread apply all bt {FRAMES}"]
    else:
        logger.warning("no C stacks, because neither py-spy nor gdb is installed: `pip install py-spy`")
        return
    ctypes.CDLL(None).prctl(PR_SET_PTRACER, ANY, 0, 0, 0)  # some kernels let only ancestors look, unless allowed
    sys.stderr.flush()
    # `timeout`, as this process cannot watch the time while it is stopped
    command = ["timeout", "--signal=KILL", str(SECONDS), *command]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=2, stderr=2, check=False)
    if done.returncode:
        logger.warning("%s has failed, with exit code %d", command[3], done.returncode)
