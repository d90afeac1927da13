"""Tests runs with a full disk, a gradient that is not finite, and an exploding KL."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
import yaml
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

import warm_python
from commands import ROOT, demo_folder, read_events, read_rows
from hybrid3d.report.timeline import read_timeline
from hybrid3d.storage import manifest
from run_ranks import environment

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

UNSHARE = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--mount"]
MIB = 16  # room for one checkpoint of the demo's model (11 MB), and not for two

# Of rank 3, which has half of the last stage, the losses of two micro batches a step are NaN at steps 2 and 3.
NAN = """
import os, sys
if os.environ.get("RANK") == "3" and "hybrid3d" in sys.orig_argv:  # not in processes of rewards
    from hybrid3d.rl.objective import PolicyObjective
    call, calls = PolicyObjective.__call__, []
    def broken(self, scored, rows):
        losses, sums = call(self, scored, rows)
        calls.append(rows)
        return (losses * float("nan") if len(calls) > 4 else losses), sums
    PolicyObjective.__call__ = broken
"""


# Of rank 3 the losses of the two micro batches of step 1 are NaN.
NAN_SUPERVISED = """
import os, sys
if os.environ.get("RANK") == "3" and "hybrid3d" in sys.orig_argv:  # not in processes of rewards
    from hybrid3d.rl import objective
    call, calls = objective.sft_loss, []
    def broken(scored, rows):
        losses, sums = call(scored, rows)
        calls.append(rows)
        return (losses * float("nan") if len(calls) in (3, 4) else losses), sums
    objective.sft_loss = broken
"""


def events_of(run: Path) -> list[dict[str, Any]]:
    return read_events(run)


def can_mount() -> bool:
    tried = [*UNSHARE, "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return shutil.which("unshare") is not None and subprocess.run(tried, capture_output=True).returncode == 0


def make_supervised(demo: Path, tmp_path: Path) -> dict[str, Any]:
    """Create a recipe for a few steps with its model and data."""
    shutil.copytree(demo / "base", tmp_path / "model")
    pq.write_table(pq.read_table(demo / "train.parquet").slice(0, 20), tmp_path / "data.parquet")
    return {
        "name": "full",
        "model": {"path": "model"},
        "train": {"tp": 2, "pp": 2, "micro_batch_size": 4},
        "data": {"train": "data.parquet", "eval": "data.parquet"},
        "algorithm": {"name": "sft", "prompts_per_step": 8},
        "optimizer": {"lr": 1.0e-4},
        "run": {"steps": 6, "checkpoint_every": 2, "dir": "small"},
    }


def test_disk_that_is_full(demo: Path, tmp_path: Path) -> None:
    """The second checkpoint does not fit: the run ends with one message, and the first checkpoint stays."""
    if not can_mount():
        pytest.skip("mounting a small tmpfs needs root, or user namespaces")
    recipe = make_supervised(demo, tmp_path)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    (tmp_path / "small").mkdir()
    # The mount is seen by this shell and its children alone, and goes with them
    script = f"""
        mount -t tmpfs -o size={MIB}m tmpfs small
        {sys.executable} -m hybrid3d train recipe.yaml; code=$?
        cp -r small/full kept; exit $code"""
    done = subprocess.run(
        [*UNSHARE, "sh", "-c", script], cwd=tmp_path, env=environment(""), capture_output=True, text=True, timeout=300
    )
    said, kept = done.stdout + done.stderr, tmp_path / "kept"
    assert done.returncode == 1, said
    assert said.count("stopped: no room for small/full/checkpoints/step-000004.partial: ") == 1
    assert "bytes are free on its file system" in said
    assert "Traceback" not in said
    assert "failed" not in said
    assert [path.name for path in (kept / "checkpoints").iterdir()] == ["step-000002"]
    manifest.check(kept / "checkpoints/step-000002")
    low = next(event for event in events_of(kept) if event["event"] == "disk_low")
    assert low["wanted"] == sum(path.stat().st_size for path in whole_files(kept / "checkpoints/step-000002"))
    assert low["free"] < low["wanted"] < MIB * 2**20
    assert said.index("will take about") < said.index("no room")
    assert [event["event"] for event in events_of(kept)][-2:] == ["disk_low", "checkpoint_unwritten"]


@pytest.mark.slow
def test_supervised_training_skips_what_is_not_finite(demo: Path, tmp_path: Path) -> None:
    recipe = make_supervised(demo, tmp_path)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe | {"guard": {"max_grad_norm": 1e-6}}))
    (tmp_path / "nan").mkdir()
    (tmp_path / "nan" / "sitecustomize.py").write_text(NAN_SUPERVISED)
    path = f"{tmp_path / 'nan'}:{environment('')['PYTHONPATH']}"
    command = [sys.executable, "-m", "hybrid3d", "train", "recipe.yaml", "run.steps=3", "run.checkpoint_every=1"]

    def train(**variables: str) -> None:
        env = environment("", **variables)
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr

    train(PYTHONPATH=path)
    run = tmp_path / "small/full"
    told = [(e["event"], e["step"]) for e in events_of(run) if e["event"] in ("batch_skipped", "bound_left")]
    assert told == [("bound_left", 0), ("batch_skipped", 1)]
    assert [row["train/grad_norm"] is None for row in read_rows(run)] == [False, True, False]
    weights = [tensors_of(run / f"checkpoints/step-{updates:06d}") for updates in (1, 2, 3)]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
    assert not all(torch.equal(tensor, weights[2][name]) for name, tensor in weights[0].items())
    (run / "control.yaml").write_text("run.steps: 4")  # a run that has ended goes on
    train()
    assert [row["step"] for row in read_rows(run)] == [0, 1, 2, 3]


def whole_files(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.name != manifest.MANIFEST]


def tensors_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Read weights and optimizer state with torch itself."""
    found: dict[str, Any] = {}
    _load_state_dict(found, FileSystemReader(checkpoint), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}


@pytest.mark.slow
def test_kl_that_explodes_and_gradients_that_are_not_finite(demo: Path, tmp_path: Path) -> None:
    """The KL coefficient is fixed at step 1 and a batch skipped at step 2; another at step 3 exceeds the limit."""
    demo_folder(tmp_path, demo)
    (tmp_path / "nan").mkdir()
    (tmp_path / "nan" / "sitecustomize.py").write_text(NAN)
    arguments = ["name=faults", "model.path=build/demo/base", "run.steps=9", "run.eval_every=99"]
    arguments += ["run.checkpoint_every=1", "algorithm.prompts_per_step=16", "rollout.max_new_tokens=8"]
    arguments += ["algorithm.entropy_coef=0.1"]  # where all rewards are alike, this still moves the weights
    arguments += ["algorithm.kl.target=1.0", "algorithm.kl.horizon=128"]
    arguments += ["guard.kl_explosion=1e-12", "guard.max_interventions=2"]
    variables = {"PYTHONPATH": f"{tmp_path / 'nan'}:{environment('')['PYTHONPATH']}", "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(
        [warm_python.executable(), "-m", "hybrid3d", "train", str(ROOT / "recipes/demo-cpu.yaml"), *arguments],
        cwd=tmp_path, env=environment("", **variables), capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    said, run = done.stdout + done.stderr, tmp_path / "runs/faults"
    assert done.returncode == 1, said
    assert said.count("stopped: step 3: the policy's gradient norm nan is not finite") == 1
    assert said.count("guard.max_interventions=2 is exceeded") == 1
    assert "Traceback" not in said
    assert "failed" not in said
    interventions = [(e["event"], e["step"], e["interventions"]) for e in events_of(run) if "interventions" in e]
    assert interventions == [("kl_fixed", 1, 1), ("batch_skipped", 2, 2), ("batch_skipped", 3, 3)]
    rows = read_rows(run)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert [row["train/grad_norm"] is None for row in rows] == [False, False, True]
    timeline = read_timeline(run / "timeline.json")  # that of the last step that was complete
    assert timeline is not None
    assert (timeline.step, len(timeline.ranks)) == (2, 4)
    assert rows[0]["train/answer_kl"] == 0
    assert rows[0]["train/kl_coef"] == rows[2]["train/kl_coef"] == 0.001
    assert rows[1]["train/kl_coef"] == pytest.approx(0.001 * (1 - 0.2))
    second, third, skipped = (tensors_of(run / f"checkpoints/step-{updates:06d}") for updates in (1, 2, 3))
    assert any("exp_avg_sq" in name for name in third)
    assert all(torch.equal(skipped[name], third[name]) for name in third)
    assert not all(torch.equal(second[name], third[name]) for name in third)
