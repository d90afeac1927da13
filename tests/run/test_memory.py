"""The peak memory of each phase: measured in a process, recorded in a run's folder, and shown beside the plan."""

from __future__ import annotations

import html
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hybrid3d.report.run_data import read_run
from hybrid3d.report.tables import MEASURED_ON, memory_table, rank_memory_table
from hybrid3d.run import metrics
from hybrid3d.run.folder import RunFolder
from hybrid3d.run.logger import Display, RunLogger
from hybrid3d.run.metrics import MemoryMeter, PhaseTimer
from report_runs import SPANS, write_run
from run_ranks import environment

MB = 10**6
PLAN = {
    "memory": {"gpu": 80e9, "train": 40e9, "sync": 30e9, "generate": 60e9, "max_weights": 8e9, "kv_cache_tokens": 9}
}
PEAKS = {
    0: {"sync": 10e9, "generate": 50e9, "train": 44e9, "wait": 70e9},
    1: {"sync": 20e9, "generate": 48e9, "train": 30e9},
}


def resident() -> int:
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmRSS")).split()[1]) * 1024


def use(nbytes: int) -> None:
    """Use memory and free it."""
    np.ones(nbytes, np.uint8).sum()


def test_peak_of_each_phase_is_its_own() -> None:
    """Two phases that use much, and one between them that does not; seen although the memory is free at the end."""
    timer = PhaseTimer({"eval": "wait"})
    before = resident()
    for phase, nbytes in (("sync", 300 * MB), ("generate", 0), ("train", 50 * MB), ("train", 150 * MB), ("eval", 0)):
        with timer(phase):
            use(nbytes)
    above = {activity: (peak - before) / MB for activity, peak in timer.peaks.items()}
    assert above == pytest.approx({"sync": 300, "generate": 0, "train": 150, "wait": 0}, abs=30)


def test_memory_meter_does_not_count_after_its_stop() -> None:
    meter = MemoryMeter()
    meter.start()
    use(100 * MB)
    meter.split()
    stopped = meter.stop()
    use(300 * MB)
    meter.split()
    assert meter.stop() == stopped
    meter.start()
    assert meter.stop() < stopped - 70 * MB


def test_kernel_that_resets_no_peak(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(metrics, "CLEAR_REFS", tmp_path / "nowhere" / "clear_refs")
    use(400 * MB)
    meter = MemoryMeter()
    meter.start()
    held = np.ones(100 * MB, np.uint8)
    before = resident()
    assert meter.stop() == pytest.approx(before, abs=30 * MB)
    assert held[0]


class Gpu:
    """The numbers of torch's allocator, which does not see what vLLM frees while it sleeps."""

    def __init__(self) -> None:
        self.allocated = self.peak = 0

    def allocate(self, nbytes: int) -> None:
        self.allocated += nbytes
        self.peak = max(self.peak, self.allocated)

    def reset(self) -> None:
        self.peak = self.allocated


def test_memory_freed_in_vllms_sleep_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step: 40 of the trainer, vLLM's weights of 10 and KV cache of 100, which sleep and wake as in a run."""
    gpu, asleep = Gpu(), {"weights": 10, "kv_cache": 100}
    fake = SimpleNamespace(
        is_initialized=lambda: True, max_memory_allocated=lambda: gpu.peak, reset_peak_memory_stats=gpu.reset
    )
    monkeypatch.setattr(metrics, "measured_device", lambda: "cuda")
    monkeypatch.setattr(metrics, "torch", SimpleNamespace(cuda=fake))
    meter = MemoryMeter()
    meter.asleep = lambda: sum(asleep.values())
    gpu.allocate(150)

    meter.start()  # the sync
    meter.split()
    del asleep["weights"]
    gpu.allocate(3)
    gpu.allocate(-3)
    gpu.allocate(-25)  # the trainer is offloaded
    meter.stop()
    del asleep["kv_cache"]
    assert meter.stop() == 40 + 10 + 3

    meter.start()  # generation
    gpu.allocate(2)
    gpu.allocate(-2)
    assert meter.stop() == 15 + 110 + 2

    meter.start()  # training
    asleep |= {"weights": 10, "kv_cache": 100}
    meter.start()
    gpu.allocate(25)
    gpu.allocate(20)
    gpu.allocate(-20)
    meter.split()
    del asleep["weights"]
    gpu.allocate(1)
    assert meter.stop() == 40 + 20


def run_with_memory(path: Path, device: str = "cuda") -> RunFolder:
    folder = write_run(path)
    record = RunLogger(folder, 0, Display("run", 6, None))
    for step in range(7):
        scale = 0.5 if step == 3 else 0.25
        peaks = {rank: {name: round(scale * n) for name, n in one.items()} for rank, one in PEAKS.items()}
        record.memory(step, peaks)
    record.timeline(
        5, {"train": [0], "generation": [1]}, SPANS, {r: {a: int(n) for a, n in p.items()} for r, p in PEAKS.items()}
    )
    folder.memory.write_text(folder.memory.read_text().replace('"device": "cpu"', f'"device": "{device}"'))
    return folder


def test_step_records_the_fullest_rank_of_each_phase(tmp_path: Path) -> None:
    folder = run_with_memory(tmp_path / "run", device="cpu")
    rows = [json.loads(line) for line in folder.memory.read_text().splitlines()]
    most = {"memory/max_sync_bytes": 10e9, "memory/max_generate_bytes": 25e9, "memory/max_train_bytes": 22e9}
    assert rows[3] == {"step": 3, "device": "cpu", **most}
    assert [row["step"] for row in rows] == list(range(7))
    assert not any(key.startswith("memory/") for line in folder.metrics.open() for key in json.loads(line))
    folder.truncate_records(3)  # what a run that resumes does
    assert [json.loads(line)["step"] for line in folder.memory.open()] == [0, 1, 2]


def test_measured_beside_planned(tmp_path: Path) -> None:
    run = read_run(run_with_memory(tmp_path / "run").path)
    columns, rows = memory_table(run, PLAN)
    table = {row.label: (row.cells, row.note) for row in rows}
    assert columns == ["Plan", "of a GPU", "Measured", "of the plan"]
    at_3 = "measured: the most, at step 3"
    assert table == {
        "Training": (["40 GB", "50 %", "22 GB", "55 %"], at_3),
        "Sync": (["30 GB", "37.5 %", "10 GB", "33.33 %"], at_3),
        "Generation": (["60 GB", "75 %", "25 GB", "41.67 %"], at_3),
        "weights, at most": (["8 GB", "10 %", "–", "–"], ""),
    }
    assert [row.cells for row in memory_table(run, None)[1]] == [["22 GB"], ["10 GB"], ["25 GB"]]
    assert run.timeline is not None
    columns, ranks = rank_memory_table(run.timeline.ranks)
    assert columns == ["Training", "Sync", "Generation"]
    assert {row.label: row.cells for row in ranks} == {
        "rank 0 · train": ["44 GB", "10 GB", "50 GB"],
        "rank 1 · generation": ["30 GB", "20 GB", "48 GB"],
    }


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_page_says_whose_memory_it_is(tmp_path: Path, device: str) -> None:
    """The page is made by the command, so that what it embeds and draws is seen as a user sees it."""
    folder = run_with_memory(tmp_path / "run", device)
    command = [sys.executable, "-m", "hybrid3d", "report", str(folder.path)]
    subprocess.run(command, env=environment(""), check=True, timeout=60)
    page = (folder.path / "report.html").read_text()
    text = html.unescape(page)
    assert [one in text for one in MEASURED_ON.values()] == [found == device for found in MEASURED_ON]
    (data,) = (part.split("</script>")[0] for part in page.split('id="data">')[1:])
    metrics: dict[str, Any] = json.loads(data)["runs"][0]["metrics"]
    assert metrics["memory/max_train_bytes"]["values"] == [11e9] * 3 + [22e9] + [11e9] * 3
    assert 'data-key="memory/max_train_bytes"' in page
    assert "Measured memory by phase, fullest rank" in page


def test_comparison_with_a_cpu_is_not_made(tmp_path: Path) -> None:
    run = read_run(run_with_memory(tmp_path / "run", "cpu").path)
    columns, rows = memory_table(run, PLAN)
    assert columns == ["Plan", "of a GPU", "Measured"]
    assert rows[0].cells == ["40 GB", "50 %", "22 GB"]
    assert "cannot be compared" in MEASURED_ON["cpu"]


@pytest.mark.parametrize(
    "line", ["[1]", '{"step": 1}', '{"step": 1, "device": [2]}', '{"step": 1, "device": "cuda", "memory/max']
)
def test_row_that_is_none_is_left_out(tmp_path: Path, line: str) -> None:
    folder = run_with_memory(tmp_path / "run")
    folder.memory.write_text(line + "\n" + folder.memory.read_text())
    run = read_run(folder.path)
    assert run.unreadable == {"memory.jsonl": 1}
    assert len(run.metric("memory/max_train_bytes")) == 7
