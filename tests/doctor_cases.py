"""Checks for tests of the runner: one passes, one fails, one crashes, one hangs with processes of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from hybrid3d.doctor.gpu.check import CheckLog, CheckSkipped, expect


def passes(record: CheckLog, device: str, value: int) -> None:
    record(device=device, value=value, variable=os.environ.get("DOCTOR_CASE"), folder=os.getcwd())


def fails(record: CheckLog, device: str) -> None:
    record(measured=3)
    print("the output of a check")
    expect(2 + 1 == 4, "measured 3, expected 4")


def raises(record: CheckLog, device: str) -> None:
    raise ValueError("first line\nsecond line")


def crashes(record: CheckLog, device: str) -> None:
    record(before=1)
    os.kill(os.getpid(), signal.SIGSEGV)


def hangs(record: CheckLog, device: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    record(first=1, child=child.pid)
    record(second=2)
    time.sleep(600)


def finds_nothing(record: CheckLog, device: str) -> None:
    raise CheckSkipped("needs a GPU with two copy engines")
