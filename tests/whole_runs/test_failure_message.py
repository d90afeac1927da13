"""Tests that a failing rank always reports the reason to its launcher."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from run_ranks import ROOT, environment

pytestmark = pytest.mark.processes

# Forks, for each exception of its first argument, one rank in a world of one whose task raises it.
RANKS = """
import os, socket, sys
from pathlib import Path
from torch.distributed.checkpoint.api import CheckpointException
from hybrid3d.config import load_recipe
from hybrid3d.run.folder import RunFolder
from hybrid3d.launch.rank import run_rank

recipe, raised = load_recipe(sys.argv[2]), eval(sys.argv[1])
for number, error in enumerate(raised):
    def task(start):
        raise error
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ["MASTER_PORT"] = str(free.getsockname()[1])
    pid = os.fork()
    if pid == 0:
        os._exit(run_rank(recipe, RunFolder(Path(sys.argv[3]) / str(number)), task, launched=True))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
"""
ENDS = {
    "SystemExit(3)": "SystemExit: 3",
    "CheckpointException('read', {})": "CheckpointException: CheckpointException ranks:",
    "KeyboardInterrupt()": "KeyboardInterrupt",
    "ValueError('boom')": "ValueError: boom",
}


def test_rank_says_why_it_ends(tmp_path: Path) -> None:
    """Some errors are not subclasses of `Exception`, and must be reported too."""
    of_rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    arguments = [f"[{', '.join(ENDS)}]", str(ROOT / "recipes/demo-cpu.yaml"), str(tmp_path)]
    command = [sys.executable, "-c", RANKS, *arguments]
    subprocess.run(command, env=environment("", **of_rank), timeout=120, check=True)
    for number, reason in enumerate(ENDS.values()):
        told = json.loads((tmp_path / str(number) / "logs/rank-0.failure").read_text())
        assert told["reason"].startswith(reason)
        assert not told["peer"]
