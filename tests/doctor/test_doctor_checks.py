"""The checks of `hybrid3d doctor --gpu` themselves: all of them on the CPU, and what they compare with."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hybrid3d.certify.tiny_models import CONFIGS, _values, split_mix
from hybrid3d.doctor.gpu.check import CheckFailed
from hybrid3d.doctor.gpu.checks import overlap, training
from hybrid3d.doctor.gpu.table import GPU_CHECKS
from run_ranks import environment

pytestmark = pytest.mark.engines

NEEDS_A_GPU = {
    *("out_of_memory", "sleep_graph", "wake_out_of_memory", "planned_memory", "apex", "transformer_engine"),
}


@pytest.mark.slow
@pytest.mark.timeout(3700)
def test_gpu_checks_that_can_pass_on_a_cpu_pass(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hybrid3d", "doctor", "--gpu", "--device", "cpu"]
    done = subprocess.run(command, cwd=tmp_path, env=environment("doctor"), capture_output=True, text=True)
    report = json.loads(done.stdout.splitlines()[-1])
    found = {one["check"]: one for one in report["checks"]}
    assert {name: one for name, one in found.items() if one["status"] == "failed"} == {}
    assert done.returncode == 0
    skipped = {name: one["reason"] for name, one in found.items() if one["status"] == "skipped"}
    assert set(skipped) == NEEDS_A_GPU
    assert all(reason.startswith("needs CUDA") for reason in skipped.values())
    assert list(found) == [check.name for check in GPU_CHECKS]


@pytest.mark.processes
def test_gpu_checks_without_vllm_run_or_name_what_they_need(tmp_path: Path) -> None:
    """As where only torch and Megatron are installed: of vLLM's and our dependencies some cannot be imported."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, importlib.machinery as machinery\n"
        "find = machinery.PathFinder.find_spec.__func__\n"
        "def hidden(cls, name, path=None, target=None):\n"
        "    if name.partition('.')[0] not in ('vllm', 'pyarrow', 'matplotlib', 'ray', 'psutil'):\n"
        "        return find(cls, name, path, target)\n"
        "machinery.PathFinder.find_spec = classmethod(hidden)\n"
    )
    variables = environment("doctor")
    variables["PYTHONPATH"] = f"{tmp_path}:{variables['PYTHONPATH']}"
    only = ["executors", "local_copies", "first_checkpoint", "overlap", "live_dense", "bench", "out_of_memory"]
    command = [sys.executable, "-m", "hybrid3d", "doctor", "--gpu", "--device", "cpu"]
    command += [word for name in only for word in ("--only", name)]
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True)
    report = json.loads(done.stdout.splitlines()[-1])
    found = {one["check"]: (one["status"], one.get("reason")) for one in report["checks"]}
    assert found == {
        "executors": ("passed", None),
        "local_copies": ("passed", None),
        "first_checkpoint": ("passed", None),
        "overlap": ("passed", None),
        "live_dense": ("skipped", "needs vllm"),
        "bench": ("skipped", "needs vllm"),
        "out_of_memory": ("skipped", "needs CUDA"),
    }, report


def test_latent_attention_has_the_head_sizes_of_deepseek() -> None:
    """Others have no prefill backend on Hopper."""
    sizes = [CONFIGS["latent"][key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")]
    assert sizes == [128, 64, 128, 512]


def test_weights_are_the_same_everywhere() -> None:
    """They are computed with integers, by a published generator, of which these are the first numbers for seed 0."""
    assert [hex(x) for x in split_mix(0, 3)] == ["0xe220a8397b1dcdaf", "0x6e789e6aa1b965f4", "0x6c45d188009454f"]
    matrix, norm = _values("lm_head.weight", (64, 64), 0), _values("model.norm.weight", (64,), 0)
    assert not matrix.equal(_values("lm_head.weight", (64, 64), 1))
    assert not norm.equal(_values("model.layers.0.input_layernorm.weight", (64,), 0))
    assert matrix.abs().max() <= 0.1
    assert (norm - 1).abs().max() <= 0.1
    assert matrix.std().item() == pytest.approx(0.1 / 3**0.5, rel=0.02)


def test_numbers_are_compared_within_a_tolerance_for_each_dtype() -> None:
    stored = {"loss": [2.0, 1.0], "grad_norm": [5.0, 4.0]}
    near = {"loss": [2.0001, 1.0], "grad_norm": [5.004, 4.0]}
    training._compare(near, stored, training.TOLERANCE["float32"], "case")
    training._compare({"loss": [2.03, 1.0], "grad_norm": [5.2, 4.0]}, stored, training.TOLERANCE["bfloat16"], "case")
    with pytest.raises(CheckFailed, match=r"case: loss of step 1 is 1\.01, on a CPU 1: they differ by 1\.0e-02"):
        training._compare(stored | {"loss": [2.0, 1.01]}, stored, training.TOLERANCE["float32"], "case")
    with pytest.raises(CheckFailed, match="grad_norm of step 0 is nan"):
        training._compare(stored | {"grad_norm": [float("nan"), 4.0]}, stored, training.TOLERANCE["bfloat16"], "case")


def test_time_that_is_in_both_of_two_sets_of_intervals() -> None:
    assert overlap._common([(0.0, 2.0), (3.0, 5.0)], [(1.0, 4.0), (9.0, 10.0)]) == 2.0
    assert overlap._common([(0.0, 1.0)], [(1.0, 2.0)]) == 0.0
