"""Checkpoints of real runs that lie in the wrong place, and what `serve` answers with after a step was trained anew."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import warm_python
from commands import ROOT, demo_folder, hybrid3d, read_rows

pytestmark = [pytest.mark.processes, pytest.mark.engines]

SETTINGS = [
    *("train.tp=1", "train.pp=1", "rollout.tp=1", "train.micro_batch_size=4", "algorithm.prompts_per_step=4"),
    *("algorithm.samples_per_prompt=2", "run.steps=2", "run.eval_every=9", "run.checkpoint_every=1"),
    # what the model is too small to learn in two steps, decay changes
    *("optimizer.weight_decay=0.1", "rollout.kv_cache_gib=0.0625", "model.path=base", "run.record=always"),
]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory, demo: Path) -> Path:
    folder = tmp_path_factory.mktemp("identity")
    demo_folder(folder, demo)
    shutil.copytree(demo / "base", folder / "base", dirs_exist_ok=True)
    hybrid3d(folder, "train", str(ROOT / "recipes/demo-cpu.yaml"), *SETTINGS, "name=one")
    return folder


def train(work: Path, *settings: str, expect: int = 0) -> str:
    done = subprocess.run(
        [
            warm_python.executable(),
            "-m",
            "hybrid3d",
            "train",
            str(ROOT / "recipes/demo-cpu.yaml"),
            *SETTINGS,
            *settings,
        ],
        cwd=work,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == expect, done.stdout + done.stderr
    return " ".join((done.stdout + done.stderr).split())


def served(work: Path, run: str, step: int) -> dict[str, torch.Tensor]:
    """Return the weights that `hybrid3d serve` starts vLLM with."""
    from hybrid3d.cli.serve import _export
    from hybrid3d.config import load_recipe
    from hybrid3d.run.folder import RunFolder

    folder = RunFolder(Path("runs") / run)
    with contextlib.chdir(work):
        weights: dict[str, Any] = load_file(_export(folder, step, load_recipe(folder.recipe)) / "model.safetensors")
    return weights


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
def test_exchanged_step_folders_and_those_of_another_run(work: Path, tmp_path: Path) -> None:
    checkpoints = work / "runs" / "one" / "checkpoints"
    kept = shutil.copytree(checkpoints, tmp_path / "kept")
    shutil.rmtree(checkpoints)
    checkpoints.mkdir()
    shutil.copytree(kept / "step-000002", checkpoints / "step-000001")
    shutil.copytree(kept / "step-000001", checkpoints / "step-000002")
    said = train(work, "name=one", expect=2)
    assert "its folder is step-000001, expected step-000002" in said
    hybrid3d(work, "eval", "runs/one", "--step", "1", expect=2)
    hybrid3d(work, "replay", "runs/one", "--step", "1", expect=2)
    shutil.rmtree(checkpoints)
    shutil.copytree(kept, checkpoints)
    (work / "runs" / "one" / "checkpoints" / "step-000002").rename(tmp_path / "away")
    train(work, "name=two", "run.seed=2")
    other = work / "runs" / "two" / "checkpoints"
    shutil.copytree(other / "step-000002", checkpoints / "step-000002")
    said = train(work, "name=one", expect=2)
    assert "is of another run or step: its run is" in said
    shutil.rmtree(checkpoints / "step-000002")
    (tmp_path / "away").rename(checkpoints / "step-000002")
    hybrid3d(work, "replay", "runs/one", "--step", "1")


@pytest.mark.slow
def test_serve_uses_weights_of_the_checkpoint_not_of_its_number(work: Path, tmp_path: Path) -> None:
    run = work / "runs" / "one"
    first = served(work, "one", 2)
    assert equal(served(work, "one", 2), first)
    shutil.rmtree(run / "checkpoints" / "step-000002")  # back to step 1, and on with another learning rate
    (run / "control.yaml").write_text("optimizer.lr: 0.01\n")
    train(work, "name=one")
    hybrid3d(work, "export", "runs/one", str(tmp_path / "now"))
    now: dict[str, Any] = load_file(tmp_path / "now" / "model.safetensors")
    assert not equal(first, now), "the step was trained anew, to other weights"
    assert equal(served(work, "one", 2), now)
    assert [row["step"] for row in read_rows(run)] == [0, 1, 2]
