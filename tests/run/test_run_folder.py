"""Tests the folder of a run: its lock, records that survive a kill, and printed events."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from hybrid3d.config import RecipeError, load_recipe
from hybrid3d.run import folder as run_folder
from hybrid3d.run.folder import RunFolder
from hybrid3d.run.logger import Display, RunLogger
from run_ranks import ROOT

RECIPE = load_recipe(ROOT / "recipes/demo-cpu.yaml")
HOLD = """
import sys, time
from pathlib import Path
from hybrid3d.run.folder import RunFolder
with RunFolder(Path(sys.argv[1])).lock(print):
    print("held", flush=True)
    time.sleep(60)
"""
# Begins a process that would outlive it, and ends.
ABANDON = """
import os, sys, time
from hybrid3d.process import kill_when_parent_exits
parent = os.getpid()
if os.fork() == 0:
    kill_when_parent_exits(parent)
    print(os.getpid(), flush=True)
    time.sleep(60)
time.sleep(1)
os._exit(1)
"""


def test_run_folder_lock_allows_one_start_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "LOCK_TIMEOUT_SECONDS", 1)
    folder, said = RunFolder(tmp_path / "run"), list[str]()
    with subprocess.Popen([sys.executable, "-c", HOLD, folder.path], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        by = f"{folder.path} is used by process {other.pid} on "
        with pytest.raises(RecipeError, match=by) as caught, folder.lock(said.append):
            pytest.fail("two at once")
        assert f"remove {folder.path / '.lock'}" in str(caught.value)
        assert [text[: len(by)] for text in said] == [by]
        monkeypatch.setattr(run_folder, "LOCK_TIMEOUT_SECONDS", 30)
        other.kill()
        with folder.lock(said.append):  # as soon as it is gone
            assert str(os.getpid()) in (folder.path / ".lock").read_text()
    with folder.lock(pytest.fail):
        pass


def test_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecipeError, match=r"cannot be written \(Not a directory\): set another run\.dir"):
        RunFolder(tmp_path / "file/run").lock(print).__enter__()


def test_process_goes_with_the_one_that_began_it() -> None:
    done = subprocess.run([sys.executable, "-c", ABANDON], capture_output=True, text=True, timeout=60)
    child = int(done.stdout)
    deadline = time.monotonic() + 10
    while Path(f"/proc/{child}").exists() and _state(child) != "Z":
        assert time.monotonic() < deadline, "it lives on"
        time.sleep(0.05)


def _state(process: int) -> str:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def test_recipe_is_whole_whenever_a_run_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create(RECIPE)
    first = folder.recipe.read_text()
    monkeypatch.setattr(run_folder.os, "replace", lambda *paths: pytest.fail("it is there already"))
    folder.create(RECIPE)
    folder.recipe.write_text("name: other\n")

    def killed(*paths: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run_folder.os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        folder.create(RECIPE)
    assert folder.recipe.read_text() == "name: other\n"
    monkeypatch.undo()
    folder.create(RECIPE)
    assert folder.recipe.read_text() == first


def test_logs_of_eval_are_not_those_of_training(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    other = folder.with_logs_in("eval")
    assert other.failure_path(0) == tmp_path / "logs/eval/rank-0.failure"
    assert (other.checkpoints, other.recipe) == (folder.checkpoints, folder.recipe)
    assert folder.log_path(0) == tmp_path / "logs/rank-0.log"


def test_reward_text_is_not_printed_as_markup(tmp_path: Path) -> None:
    console = Console(file=open(tmp_path / "said", "w"), width=200)  # noqa: SIM115
    folder = RunFolder(tmp_path)
    with Display("run", 1, console) as display:
        RunLogger(folder, 0, display).event("reward_failed", "not a float: '[/b] [red]7'", step=3)
    console.file.close()
    assert (tmp_path / "said").read_text() == "not a float: '[/b] [red]7'\n"
    assert json.loads(folder.events.read_text())["step"] == 3
