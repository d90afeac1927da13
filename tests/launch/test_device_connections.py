"""CUDA_DEVICE_MAX_CONNECTIONS follows from what a recipe overlaps, and is set before anything initializes CUDA."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hybrid3d.cli.starting import VARIABLE, set_device_connections
from hybrid3d.config import load_recipe
from run_ranks import ROOT, environment

DEMO = ROOT / "recipes/demo-cpu.yaml"

# What `train` sets, seen by the first check, which imports torch; the check ends the command.
SEEN = """
import os, sys
from hybrid3d import cli
from hybrid3d.cli import train
from hybrid3d.errors import UserMistake

def check_layout_early(recipe):
    assert "torch" not in sys.modules
    raise UserMistake(str(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")))

train.check_layout_early = check_layout_early
sys.exit(cli.main(["train", *sys.argv[1:]]))
"""


@pytest.mark.parametrize(
    ("settings", "connections"),
    [
        (["train.tp=2"], "1"),
        (["train.tp=2", "sync.overlap=false"], "1"),  # communication in every layer outweighs one sync a step
        (["train.tp=1"], None),
        (["train.tp=1", "sync.overlap=false"], None),
    ],
)
def test_device_connections_follow_from_what_is_overlapped(
    settings: list[str], connections: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "to be restored")
    monkeypatch.delenv(VARIABLE)
    set_device_connections(load_recipe(DEMO, settings))
    assert os.environ.get(VARIABLE) == connections


@pytest.mark.parametrize(
    ("settings", "given", "expected"),
    [(["train.tp=2"], None, "1"), (["train.tp=2"], "32", "32"), (["train.tp=1"], None, "None")],
)
def test_device_connections_are_set_first_and_users_value_kept(
    settings: list[str], given: str | None, expected: str, tmp_path: Path
) -> None:
    variables = {key: value for key, value in environment("-").items() if key != VARIABLE}
    command = [sys.executable, "-c", SEEN, str(DEMO), *settings]
    variables |= {} if given is None else {VARIABLE: given}
    done = subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.strip()) == (2, expected), done.stdout


def test_launch_scripts_do_not_set_device_connections() -> None:
    scripts = [path for path in (ROOT / "launch").rglob("*.sh") if f"export {VARIABLE}" in path.read_text()]
    assert scripts == []
