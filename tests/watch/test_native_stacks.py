"""C stacks of a process that blocks, by the debugger that is installed."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from commands import ROOT

pytestmark = pytest.mark.processes

BLOCKED = """
import logging, threading, time
from hybrid3d.watch.watchdog import write_native_stacks
logging.basicConfig()
threading.Thread(target=write_native_stacks).start()
time.sleep(8)
print("goes on")
"""


def run(path: str | None = None) -> tuple[str, str]:
    """Return what a process writes to stdout and stderr that blocks while its stacks are written."""
    variables = {"PYTHONPATH": str(ROOT / "src")} | ({} if path is None else {"PATH": path})
    done = subprocess.run([sys.executable, "-c", BLOCKED], env=variables, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.mark.skipif(not (shutil.which("gdb") or shutil.which("py-spy")), reason="no debugger is installed")
def test_main_thread_s_c_stack_is_written_and_it_continues() -> None:
    stdout, stderr = run("/usr/bin:/bin:/usr/local/bin")
    assert "nanosleep" in stderr
    assert stdout == "goes on\n"


def test_native_stacks_without_a_debugger_say_what_to_install() -> None:
    stdout, stderr = run("/nowhere")
    assert "neither py-spy nor gdb is installed" in stderr
    assert stdout == "goes on\n"
