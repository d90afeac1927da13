"""Checks for tests of what runs them: one passes, one fails, one crashes, one hangs with processes of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from gpu.record import Record

pytestmark = pytest.mark.limit(60)


@pytest.mark.variables(GPU_CASE="set", HF_HUB_OFFLINE=None)
def test_passes(record: Record, device: str) -> None:
    offline, variable = os.environ.get("HF_HUB_OFFLINE"), os.environ.get("GPU_CASE")
    record(device=device, variable=variable, offline=offline, folder=os.getcwd())


def test_fails(record: Record) -> None:
    record(measured=3)
    print("the output of a check")
    measured = 2 + 1
    assert measured == 4, f"measured {measured}, expected 4"


def test_raises() -> None:
    raise ValueError("first line\nsecond line")


def test_crashes(record: Record) -> None:
    record(before=1)
    os.kill(os.getpid(), signal.SIGSEGV)


def test_finds_nothing() -> None:
    pytest.skip("needs a GPU with two copy engines")


@pytest.mark.needs("cuda", "2 gpus")
def test_needs() -> None:
    raise AssertionError("this was run")


@pytest.mark.limit(1.5)
def test_hangs(record: Record) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    record(first=1, child=child.pid)
    record(second=2)
    time.sleep(600)


def test_waits(record: Record) -> None:
    record(pid=os.getpid())
    time.sleep(600)


def test_last() -> None:
    pass
