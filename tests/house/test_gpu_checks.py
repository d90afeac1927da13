"""`make gpu-check`: what runs each check in a process, with checks of its own, and the command on a CPU."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from gpu import machine
from gpu.machine import NEEDS, Machine
from gpu.table import CHECKS
from run_ranks import environment
from test_readme import exists, help_of, make_targets, paths, subcommands

ROOT = Path(__file__).resolve().parents[2]
GPU = ROOT / "tests" / "gpu"
TOTAL_SECONDS = 1200


def start(*arguments: str, folder: Path) -> subprocess.Popen[str]:
    variables = {key: value for key, value in environment("gpu").items() if key != "PYTEST_ADDOPTS"}
    variables["PYTHONPATH"] = f"{ROOT / 'tests'}:{variables['PYTHONPATH']}"
    command = [sys.executable, "-m", "pytest", "-c", str(GPU / "pytest.ini"), "--device", "cpu", *arguments]
    return subprocess.Popen(
        command, cwd=folder, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """Return the exit code, the result of each check, and the report; each result was printed as it ended."""
    out, err = process.communicate(timeout=300)
    lines = [line for line in out.splitlines() if line.startswith("{")]
    assert lines, out + err
    report = json.loads(out.splitlines()[-1])
    assert [json.loads(line) for line in lines[1:-1]] == report["checks"]
    counts = [f"{report[status]} {status}" for status in ("passed", "failed", "skipped")]
    assert out.splitlines()[-2] == ", ".join(counts)
    return process.returncode, {one["check"]: one for one in report["checks"]}, report


def only(*names: str) -> list[str]:
    return [str(GPU / "cases.py"), *(word for name in names for word in ("--only", name))]


@pytest.mark.processes
def test_gpu_check_is_a_process_with_numbers_and_reasons(tmp_path: Path) -> None:
    names = ("passes", "fails", "raises", "crashes", "finds_nothing", "needs", "hangs", "last")
    code, found, report = ended(start(*only(*names), "--json", "out.json", folder=tmp_path))
    assert code == 1
    assert list(found) == [*names]
    assert json.loads((tmp_path / "out.json").read_text()) == report
    passed = found["passes"]
    numbers = {"device": "cpu", "variable": "set", "offline": None}
    assert passed == passed | {"status": "passed"}
    assert passed["numbers"] == numbers | {"folder": passed["numbers"]["folder"]}
    assert not Path(passed["numbers"]["folder"]).exists()
    failed = found["fails"]
    assert (failed["status"], failed["reason"]) == ("failed", "measured 3, expected 4")
    assert failed["numbers"] == {"measured": 3}
    assert "the output of a check" in failed["output"]
    assert found["raises"]["reason"] == "ValueError: first line"
    assert any("second line" in line for line in found["raises"]["output"])
    assert (found["crashes"]["reason"], found["crashes"]["numbers"]) == ("ended with exit code -11", {"before": 1})
    assert (found["finds_nothing"]["status"], found["finds_nothing"]["reason"]) == (
        "skipped",
        "needs a GPU with two copy engines",
    )
    assert found["needs"] == {"check": "needs", "status": "skipped", "reason": "needs CUDA"}
    assert (report["passed"], report["failed"], report["skipped"]) == (2, 4, 2)
    hung = found["hangs"]  # it is killed with its processes, and keeps its numbers
    assert (hung["status"], hung["reason"]) == ("failed", "still running after 4.5 s")
    assert (hung["numbers"]["first"], hung["numbers"]["second"]) == (1, 2)
    assert not Path(f"/proc/{hung['numbers']['child']}").exists()
    assert report["machine"]["versions"]["python"] == sys.version.split()[0]


@pytest.mark.processes
def test_total_limit_ends_running_check_and_skips_the_rest(tmp_path: Path) -> None:
    limit = ["--total-seconds", "5"]  # three times as many on a CPU
    code, found, _ = ended(start(*only("waits", "last"), *limit, folder=tmp_path))
    assert code == 1
    assert found["waits"]["reason"].startswith("still running after ")
    assert found["last"]["reason"] == "not run: the time limit of all checks, 15 s, was reached"


@pytest.mark.processes
def test_signal_ends_the_check_that_runs_and_reports_the_rest(tmp_path: Path) -> None:
    process = start(*only("passes", "waits", "last"), "--json", "out.json", folder=tmp_path)
    deadline = time.monotonic() + 120
    while not (tmp_path / "out.json").exists():  # the first has ended
        assert time.monotonic() < deadline
        time.sleep(0.1)
    time.sleep(1)
    process.send_signal(signal.SIGTERM)
    code, found, _ = ended(process)
    assert code == 1
    assert found["waits"]["reason"] == "ended by SIGTERM"
    assert found["last"]["reason"] == "not run: the run was ended by SIGTERM"


def test_missing_needs_are_named() -> None:
    nothing = Machine(gpus=[], present=["megatron"], versions={})
    assert nothing.missing(["megatron"]) is None
    assert nothing.missing(["cuda", "vllm", "cumem", "transformer_engine", "apex", "2 gpus", "megatron"]) == (
        "needs CUDA, vllm, vLLM's cumem_allocator, Transformer Engine, Apex's fused_weight_gradient_mlp_cuda, 2 GPUs"
    )


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


def test_gpu_checks_need_what_can_be_found_out() -> None:
    assert len({check.name for check in CHECKS}) == len(CHECKS) > 30
    assert {need for check in CHECKS for need in check.needs} <= set(NEEDS)


def test_gpu_checks_take_twenty_minutes_at_most_on_one_gpu() -> None:
    """Every limit reached, and no vLLM, Transformer Engine, Apex or second GPU."""
    others = {"vllm", "transformer_engine", "apex", "2 gpus"}
    assert sum(check.seconds for check in CHECKS if not others & set(check.needs)) <= TOTAL_SECONDS


@pytest.mark.processes
def test_mistakes_on_the_command_line_of_gpu_checks(tmp_path: Path) -> None:
    for arguments, message in (
        ([*only("nvlink")], "--only nvlink: there is no such check; there are passes, fails"),
        ([*only("last"), "--json", "no/out.json"], "--json no/out.json (there is no folder no): name a file"),
    ):
        process = start(*arguments, folder=tmp_path)
        _, said = process.communicate(timeout=60)
        assert process.returncode == 4  # as of all mistakes on pytest's command line
        assert said.strip().splitlines()[-1].startswith(f"ERROR: {message}")


def test_gpu_page_names_every_check_and_every_unrun_file() -> None:
    page = (ROOT / "docs" / "gpu.md").read_text()
    before, _, rows = page.partition("## What crosses each row off")
    checks, _, table = before.partition("## What has not run")
    first_columns = " ".join(line.split("|")[1] for line in checks.splitlines() if line.startswith("| `"))
    assert sorted(re.findall(r"`(\w+)`", first_columns)) == sorted(check.name for check in CHECKS)
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


OF_MEGATRON = ("executors", "local_copies", "first_checkpoint", "overlap")
NEEDS_A_GPU = {
    *("out_of_memory", "sleep_graph", "wake_out_of_memory", "planned_memory", "apex", "transformer_engine"),
    "train_fp8",
}


@pytest.mark.slow
@pytest.mark.timeout(3700)
def test_gpu_checks_that_can_pass_on_a_cpu_pass(tmp_path: Path) -> None:
    code, found, _ = ended(start(str(GPU), folder=tmp_path))
    assert {name: one for name, one in found.items() if one["status"] == "failed"} == {}
    assert code == 0
    skipped = {name: one["reason"] for name, one in found.items() if one["status"] == "skipped"}
    assert set(skipped) == NEEDS_A_GPU
    assert all(reason.startswith("needs CUDA") for reason in skipped.values())
    assert list(found) == [check.name for check in CHECKS]


@pytest.mark.engines
@pytest.mark.processes
@pytest.mark.parametrize(
    ("absent", "of_megatron"),
    [
        pytest.param(("vllm",), ("executors", "overlap"), id="vllm"),
        pytest.param(("vllm",), ("local_copies", "first_checkpoint"), id="vllm, more checks", marks=pytest.mark.slow),
        pytest.param(("vllm", "megatron"), OF_MEGATRON, id="vllm and megatron", marks=pytest.mark.slow),
    ],
)
def test_gpu_checks_without_engines_run_or_name_what_they_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, absent: tuple[str, ...], of_megatron: tuple[str, ...]
) -> None:
    """As where only torch is installed, or torch and Megatron: some of our dependencies cannot be imported either."""
    hidden = (*absent, "pyarrow", "matplotlib", "ray", "psutil", "msgspec", "xdist")
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, importlib.machinery as machinery\n"
        "find = machinery.PathFinder.find_spec.__func__\n"
        "def hidden(cls, name, path=None, target=None):\n"
        f"    if name.partition('.')[0] not in {hidden}:\n"
        "        return find(cls, name, path, target)\n"
        "machinery.PathFinder.find_spec = classmethod(hidden)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    names = ["versions", *of_megatron, "out_of_memory", "bench", "live_dense"]
    _, found, report = ended(start(str(GPU), *(word for name in names for word in ("--only", name)), folder=tmp_path))
    needs = dict.fromkeys(of_megatron, ("skipped", "needs megatron-core") if "megatron" in absent else ("passed", None))
    engines = "megatron-core, vllm" if "megatron" in absent else "vllm"
    cuda = "CUDA, megatron-core" if "megatron" in absent else "CUDA"
    assert {name: (one["status"], one.get("reason")) for name, one in found.items()} == {
        "versions": ("passed", None),
        **needs,
        "out_of_memory": ("skipped", f"needs {cuda}"),
        "bench": ("skipped", f"needs {engines}"),
        "live_dense": ("skipped", f"needs {engines}"),
    }, report
