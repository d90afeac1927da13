"""A run that is scheduled, controlled, and runs out of memory: it ends well, and tells all of it; two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from commands import ROOT, demo_folder, hybrid3d, read_events, read_rows
from hybrid3d.config import OFFLOADS

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

STEPS, SEQUENCES, MICRO_BATCH = 4, 128, 64
OUT_AT = 3  # the step in which rank 1, on the last pipeline stage, has no memory left
CONTROL = "algorithm: {kl: {coef: 0.01}}\noptimizer.lr: 3.0e-4\n"

# Rank 1 notes the micro batches that it trains on. In one of them, once, it runs out of memory, with the error that
# vLLM's allocator raises, just after somebody has edited the control file.
OUT_OF_MEMORY = f"""
import os, sys
if os.environ.get("RANK") == "1" and "hybrid3d" in sys.orig_argv:  # not in processes of rewards
    from pathlib import Path
    from hybrid3d.train.megatron import model
    run, masked_sum, sizes = Path("runs/controlled"), model.masked_sum, []
    def noted(values, mask):
        sizes.append(len(mask))
        if sum(sizes) > {OUT_AT * SEQUENCES + MICRO_BATCH} and not (run / "out-of-memory-1.json").exists():
            (run / "control.yaml").write_text("train.tp: 4\\n" + (run / "control.yaml").read_text())
            raise RuntimeError("CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:163")
        with open("sizes", "a") as out:
            print(os.getpid(), len(mask), file=out)
        return masked_sum(values, mask)
    model.masked_sum = noted
"""

SCHEDULE = "schedule={1: {algorithm.entropy_coef: 0.01}, 2: {optimizer.lr: 1.0e-4, rollout.temperature: 0.8}}"


def test_run_that_is_controlled_and_runs_out_of_memory(demo: Path, tmp_path: Path) -> None:
    demo_folder(tmp_path, demo)
    (tmp_path / "sitecustomize.py").write_text(OUT_OF_MEMORY)
    run = tmp_path / "runs" / "controlled"
    run.mkdir(parents=True)
    (run / "control.yaml").write_text(CONTROL)
    said = hybrid3d(
        tmp_path,
        "train",
        str(ROOT / "recipes/demo-cpu.yaml"),
        "name=controlled",
        "model.path=build/demo/base",
        "train.tp=1",
        "rollout.tp=1",
        f"run.steps={STEPS}",
        "run.checkpoint_every=2",
        "run.eval_every=9",
        "algorithm.prompts_per_step=16",
        f"train.micro_batch_size={MICRO_BATCH}",
        SCHEDULE,
        also=tmp_path,
    )
    cause = "CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:163"
    assert f"rank 1 failed: OutOfMemoryRestart: {cause}: after a restart" in said
    assert said.count("failed:") == 1

    events = read_events(run)
    told = [tuple(e.get(k) for k in ("event", "step", "key", "old", "new", "by")) for e in events]
    second = [
        ("setting_changed", 2, "rollout.temperature", 1.0, 0.8, "schedule"),
        ("setting_changed", 2, "optimizer.lr", 3e-4, 1e-4, "schedule"),
    ]
    smaller = {"train.micro_batch_size": MICRO_BATCH // 2} | {f"train.offload_{kind}": True for kind in OFFLOADS}
    first = {"train.micro_batch_size": MICRO_BATCH} | {f"train.offload_{kind}": False for kind in OFFLOADS}
    assert [
        row for row in told if row[0] not in ("kernels", "checkpoint", "data", "optimizer_sharding", "sync_dense")
    ] == [
        ("start", 0, None, None, None, None),
        ("setting_changed", 0, "algorithm.kl.coef", 0.001, 0.01, "control.yaml"),
        ("setting_changed", 0, "optimizer.lr", 2e-4, 3e-4, "control.yaml"),
        ("setting_changed", 1, "algorithm.entropy_coef", 0.0, 0.01, "schedule"),
        *second,
        ("out_of_memory", None, None, first, smaller, None),
        ("resume", 2, None, None, None, None),
        *second,
        ("control_refused", 2, None, None, None, "control.yaml"),
        ("end", STEPS, None, None, None, None),
    ]
    assert [e["why"].partition(":")[0] for e in events if e["event"] == "control_refused"] == ["train.tp"]

    rows = read_rows(run)
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    assert [row.get("train/lr") for row in rows] == [3e-4, 3e-4, 1e-4, 1e-4, None]
    assert [row["train/kl_coef"] for row in rows] == [0.01] * (STEPS + 1)
    assert all(row["mismatch/logprob_abs_max"] <= 1e-3 for row in rows)  # the temperature is that of both engines

    noted = [line.split() for line in (tmp_path / "sizes").read_text().splitlines()]
    attempts = [[int(size) for pid, size in noted if pid == one] for one in dict.fromkeys(pid for pid, _ in noted)]
    assert attempts == [[MICRO_BATCH] * (2 * OUT_AT + 1), [MICRO_BATCH // 2] * 4 * (STEPS - 2)]
