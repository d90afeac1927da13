"""`hybrid3d doctor --gpu`: the runner with checks of its own, and the command on a CPU."""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from hybrid3d import cli
from hybrid3d.doctor.gpu import machine, runner
from hybrid3d.doctor.gpu.check import Check
from hybrid3d.doctor.gpu.machine import NEEDS, Machine
from hybrid3d.doctor.gpu.table import GPU_CHECKS
from run_ranks import environment
from test_readme import exists, help_of, make_targets, paths, subcommands

ROOT = Path(__file__).resolve().parents[2]
NOTHING = Machine(gpus=[], present=["megatron"], versions={"torch": "2.13.0"})


def case(name: str, seconds: float = 60, **fields: Any) -> Check:
    return Check(name, "a case", f"doctor_cases:{name}", seconds, **fields)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    """Run checks on this CPU, without looking for packages; return exit code, lines by check, and the report."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))
    monkeypatch.setattr(runner, "in_subprocess", lambda *unused: NOTHING)

    def run(*checks: Check, device: str = "cpu", **options: Any) -> tuple[int, dict[str, Any], dict[str, Any]]:
        code = runner.run_checks(checks, device, **options)
        lines = capfd.readouterr().out.splitlines()
        report = json.loads(lines[-1])
        found = [json.loads(line) for line in lines[1:-2]]
        assert found == report["checks"]
        counts = [f"{report[status]} {status}" for status in ("passed", "failed", "skipped")]
        assert lines[-2] == ", ".join(counts)
        return code, {one["check"]: one for one in found}, report

    return run


@pytest.mark.processes
def test_doctor_check_is_a_process_with_numbers_and_reasons(run, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    unset = case("passes", arguments={"value": 7}, environment={"DOCTOR_CASE": "set", "HF_HUB_OFFLINE": None})
    code, found, report = run(unset, case("fails"), case("raises"), case("crashes"), case("finds_nothing"), out=out)
    assert code == 1
    assert json.loads(out.read_text()) == report
    passed = found["passes"]
    assert (passed["status"], passed["numbers"]["value"], passed["numbers"]["variable"]) == ("passed", 7, "set")
    assert passed["numbers"]["device"] == "cpu"
    assert not Path(passed["numbers"]["folder"]).exists()
    assert found["fails"] == found["fails"] | {"status": "failed", "reason": "measured 3, expected 4"}
    assert found["fails"]["numbers"] == {"measured": 3}
    assert "the output of a check" in found["fails"]["output"]
    assert found["raises"]["reason"] == "ValueError: first line"
    assert any("second line" in line for line in found["raises"]["output"])
    assert (found["crashes"]["reason"], found["crashes"]["numbers"]) == ("ended with exit code -11", {"before": 1})
    assert found["finds_nothing"] == found["finds_nothing"] | {
        "status": "skipped",
        "reason": "needs a GPU with two copy engines",
    }
    assert (report["passed"], report["failed"], report["skipped"]) == (1, 3, 1)


@pytest.mark.processes
def test_overlong_check_is_killed_with_its_processes_and_keeps_numbers(run) -> None:
    code, found, _ = run(case("hangs", seconds=0.7), case("passes", arguments={"value": 1}))
    assert code == 1
    hung = found["hangs"]
    assert (hung["status"], hung["reason"]) == ("failed", "still running after 2.1 s")
    assert (hung["numbers"]["first"], hung["numbers"]["second"]) == (1, 2)
    assert not Path(f"/proc/{hung['numbers']['child']}").exists()
    assert found["passes"]["status"] == "passed"


@pytest.mark.processes
def test_total_limit_ends_running_check_and_skips_the_rest(run) -> None:
    code, found, _ = run(case("hangs"), case("passes", arguments={"value": 1}), total_seconds=1)
    assert code == 1
    assert found["hangs"]["reason"].startswith("still running after ")
    assert found["passes"]["reason"] == "not run: the time limit of all checks, 3 s, was reached"


@pytest.mark.processes
def test_signal_ends_the_check_that_runs_and_reports_the_rest(run) -> None:
    def interrupt() -> None:
        time.sleep(1.5)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=interrupt).start()
    before = signal.getsignal(signal.SIGTERM)
    code, found, _ = run(case("hangs"), case("passes", arguments={"value": 1}))
    assert code == 1
    assert found["hangs"]["reason"] == "ended by SIGTERM"
    assert found["passes"]["reason"] == "not run: the run was ended by SIGTERM"
    assert signal.getsignal(signal.SIGTERM) is before


def test_check_with_missing_needs_names_them_and_does_not_run(run) -> None:
    everything = case("fails", needs=("vllm", "cumem", "transformer_engine", "apex", "2 gpus", "megatron"))
    code, found, report = run(everything, case("fails", needs=("vllm",)), device="cuda")
    assert code == 0
    needed = (
        "needs CUDA, vllm, vLLM's cumem_allocator, Transformer Engine, Apex's fused_weight_gradient_mlp_cuda, 2 GPUs"
    )
    assert [one["reason"] for one in report["checks"]] == [needed, "needs CUDA, vllm"]
    assert found["fails"]["status"] == "skipped"
    assert run(case("fails", needs=("vllm",)))[1]["fails"]["reason"] == "needs vllm"


def test_package_counts_only_with_its_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's allocator may be there without vLLM: a folder `vllm` without `__init__.py`."""
    carried = tmp_path / "vllm" / "device_allocator"
    carried.mkdir(parents=True)
    for path in (tmp_path / "vllm" / "cumem_allocator.abi3.so", carried / "__init__.py", carried / "cumem.py"):
        path.touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert machine._exists("vllm.cumem_allocator")
    assert machine._exists("vllm.device_allocator.cumem")
    assert not machine._exists("vllm.entrypoints")
    assert not machine._exists("transformer_engine.pytorch")


def test_table_names_functions_that_exist() -> None:
    names = [check.name for check in GPU_CHECKS]
    assert len(set(names)) == len(names)
    for check in GPU_CHECKS:
        module, _, function = check.function.partition(":")
        tree = ast.parse((ROOT / "src" / f"{module.replace('.', '/')}.py").read_text())
        found = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
        parameters = found[function].args
        assert {a.arg for a in parameters.args + parameters.kwonlyargs} >= {"record", "device", *check.arguments}
        assert set(check.needs) <= set(NEEDS)


def test_gpu_checks_take_twenty_minutes_at_most_on_one_gpu() -> None:
    """Every limit reached, and no vLLM, Transformer Engine, Apex or second GPU."""
    others = {"vllm", "transformer_engine", "apex", "2 gpus"}
    assert sum(check.seconds for check in GPU_CHECKS if not others & set(check.needs)) <= runner.TOTAL_SECONDS


def test_mistakes_on_the_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["doctor", "--gpu", "--only", "nvlink"]) == 2
    assert capsys.readouterr().err.startswith("--only nvlink: there is no such check; there are versions, cudnn")
    assert cli.main(["doctor", "--gpu", "--json", str(tmp_path / "no" / "out.json")]) == 2
    assert "name a file in a folder that exists" in capsys.readouterr().err


def test_gpu_page_names_every_check_and_every_unrun_file() -> None:
    page = (ROOT / "docs" / "gpu.md").read_text()
    before, _, rows = page.partition("## What crosses each row off")
    checks, _, table = before.partition("## What has not run")
    first_columns = " ".join(line.split("|")[1] for line in checks.splitlines() if line.startswith("| `"))
    assert sorted(re.findall(r"`(\w+)`", first_columns)) == sorted(check.name for check in GPU_CHECKS)
    wheres = " ".join(line.split(" | ")[-1] for line in table.splitlines() if line.startswith("| "))
    not_run = set(re.findall(r"`([\w/]+(?:\.py|/)|Dockerfile)`", wheres))
    assert len(not_run) > 15
    named = re.findall(r"`([\w/.]+)`", rows)
    folders = tuple(name for name in named if name.endswith("/"))
    assert [name for name in sorted(not_run) if name not in named and not name.startswith(folders)] == []


def test_page_names_only_what_exists() -> None:
    page = (ROOT / "docs" / "gpu.md").read_text()
    ours = [name for name in paths(page) if not name.startswith(("benchmarks/results/gpu-", "vllm/"))]
    assert [name for name in sorted(ours) if not exists(name) and not (ROOT / "docs" / name).exists()] == []
    assert make_targets(page) <= {"gpu-check", "demo", "test-all", "audit-cuda"}
    known = {name: help_of(name).stdout for name in subcommands(page)}
    assert {name: [o for o in options if o not in known[name]] for name, options in subcommands(page).items()} == {
        name: [] for name in known
    }


@pytest.mark.processes
def test_command_ends_with_one_json_object(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hybrid3d", "doctor", "--gpu", "--device", "cpu", "--only", "versions"]
    command += ["--json", "out.json"]
    done = subprocess.run(command, cwd=tmp_path, env=environment("doctor"), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert (report["passed"], report["failed"], report["skipped"]) == (1, 0, 0)
    assert report["checks"][0]["numbers"]["torch"] == report["machine"]["versions"]["torch"]
    assert json.loads((tmp_path / "out.json").read_text()) == report
    assert done.stderr == ""
