"""A short run through the real commands: warm-up, export, GRPO, resume, eval, plan; four ranks, both engines."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from commands import ROOT, answers_of, hybrid3d, read_events, read_rows, warm_checkpoint, without
from hybrid3d.report.timeline import read_timeline
from killing import some_moment, start_and_kill, writing

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1500)]

STEPS, RESUMED_FROM = 3, 2
MAX_NEW_TOKENS = 8


@pytest.fixture(scope="module")
def work(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return warm_checkpoint(tmp_path_factory.mktemp("train"), demo)


def settings(name: str, bucket_mib: float) -> list[str]:
    return [
        str(ROOT / "recipes/demo-cpu.yaml"),
        f"name={name}",
        "model.path=warm",
        f"run.steps={STEPS}",
        f"run.checkpoint_every={RESUMED_FROM}",
        "run.eval_every=2",
        "algorithm.prompts_per_step=16",
        f"rollout.max_new_tokens={MAX_NEW_TOKENS}",
        f"sync.bucket_mib={bucket_mib}",
    ]


def uneven(name: str, bucket_mib: float) -> list[str]:
    """Stages of unlike sizes, each on a node of its own, whose optimizers step in unlike numbers of parts."""
    return [*settings(name, bucket_mib), "train.first_stage_layers=3", "machine.gpus_per_node=2"]


@pytest.fixture(scope="module")
def runs(work: Path) -> dict[str, Any]:
    """The same seed twice: once with one bucket, once with buckets of a twentieth of a rank's share, and overlapped."""
    wide = json.loads(hybrid3d(work, "plan", *uneven("wide", 64), "--json"))
    narrow_mib = round(wide["memory"]["max_rollout_weights"] / 20 / 2**20, 3)
    narrow = json.loads(hybrid3d(work, "plan", *uneven("narrow", narrow_mib), "--json"))
    hybrid3d(work, "train", *uneven("wide", 64), "sync.overlap=false")
    hybrid3d(work, "train", *uneven("narrow", narrow_mib), "sync.verify=always")
    return {"wide": wide, "narrow": narrow, "bucket_bytes": int(narrow_mib * 2**20)}


def test_train_measures_every_step(work: Path, runs: dict[str, Any]) -> None:
    rows = read_rows(work / "runs/wide")
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    for row in rows:
        assert row["sync/received_bytes"] == row["sync/lower_bound_bytes"] > 0
        assert 0 < row["mismatch/logprob_abs_max"] <= 1e-3
        assert row["mismatch/kl"] < 1e-5
        assert 0 < row["mismatch/logprob_abs_quarter_1"] <= row["mismatch/logprob_abs_max"]
        assert 0 <= row["reward/mean"] <= 1
        for key in ("sync/seconds", "sync/max_finalize_bytes", "time/step", "time/generate", "time/train"):
            assert row[key] > 0
    assert all(0 <= rows[step]["eval/accuracy"] <= 1 for step in (0, 2, 3))
    assert "eval/accuracy" not in rows[1]
    assert any(row.get("train/grad_norm", 0) > 0 for row in rows)


def test_run_folder_is_complete(work: Path, runs: dict[str, Any]) -> None:
    run = work / "runs/wide"
    for name in ("recipe.yaml", "samples.jsonl", "events.jsonl", "curves.png", "timeline.png", "logs/rank-3.log"):
        assert (run / name).stat().st_size > 0
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step-000002", "step-000003"]
    sample = json.loads((run / "samples.jsonl").read_text().splitlines()[0])
    told = {"step", "weights", "versions", "prompt", "answer", "reward", "prompt_tokens", "answer_tokens"}
    assert sample.keys() == told
    events = read_events(run)
    assert [event["event"] for event in events] == [
        "kernels",
        "data",
        "data",
        "optimizer_sharding",
        "start",
        "sync_dense",
        "checkpoint",
        "checkpoint",
        "end",
    ]
    (dense,) = [event for event in events if event["event"] == "sync_dense"]
    assert (dense["step"], dense["reason"].startswith("model.dtype is not bfloat16")) == (0, True)
    said = events[0]["in_use"]
    assert said.startswith("training kernels: torch")
    assert [(run / f"logs/rank-{rank}.log").read_text().count(said) for rank in range(4)] == [1, 0, 0, 0]


def test_memory_of_each_phase_is_recorded(work: Path, runs: dict[str, Any]) -> None:
    """The first update makes the optimizer's state; the timeline has the memory of each rank."""
    rows = [json.loads(line) for line in (work / "runs/wide/memory.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    for row in rows:
        phases = {"sync", "generate", "train"} | ({"eval"} if row["step"] != 1 else set())
        assert row.keys() == {"step", "device"} | {f"memory/max_{phase}_bytes" for phase in phases}
    assert rows[0]["memory/max_train_bytes"] >= rows[0]["memory/max_sync_bytes"] > 0
    events = json.loads((work / "runs/wide/timeline.json").read_text())["traceEvents"]
    peaks = {(event["tid"], event["name"]): event["args"]["peak_memory_bytes"] for event in events}
    assert max(peaks[rank, "train"] for rank in range(4)) == rows[STEPS - 1]["memory/max_train_bytes"]


def test_metrics_of_a_seed_ignore_bucket_size_and_hiding(work: Path, runs: dict[str, Any]) -> None:
    wide, narrow = (without(read_rows(work / "runs" / name), "sync/max_staging_bytes") for name in ("wide", "narrow"))
    assert wide == narrow
    staging = [row["sync/max_staging_bytes"] for row in read_rows(work / "runs/narrow")]
    assert 0 < max(staging) <= 2 * runs["bucket_bytes"]


def test_hidden_sync_begins_while_weights_are_updated(work: Path, runs: dict[str, Any]) -> None:
    for name, hides in (("wide", False), ("narrow", True)):
        assert all(0 < row["sync/exposed_seconds"] <= row["sync/seconds"] for row in read_rows(work / "runs" / name))
        logs = [(work / "runs" / name / f"logs/rank-{rank}.log").read_text() for rank in range(4)]
        told = [re.findall(r"overlapped sync: (\d+) of (\d+) received bytes", log) for log in logs]
        early = [(int(some), int(of)) for (some, of) in (one for of_rank in told for one in of_rank)]
        assert bool(early) == hides  # over gloo two buckets are started early, in which not every rank receives
        assert all(0 < some < of for some, of in early)


@pytest.mark.slow
def test_overlapped_sync_of_uneven_stages_changes_nothing(work: Path, runs: dict[str, Any]) -> None:
    mib = runs["bucket_bytes"] / 2**20
    single = ["train.tp=1", "train.dp=2", "sync.verify=always"]
    hybrid3d(work, "train", *uneven("overlapped", mib), *single)
    hybrid3d(work, "train", *uneven("after", mib), *single, "sync.overlap=false")
    overlapped, after = (read_rows(work / "runs" / name) for name in ("overlapped", "after"))
    assert without(overlapped) == without(after)


@pytest.mark.parametrize("name", ["wide", "narrow"])
def test_plan_says_what_the_run_measures(work: Path, runs: dict[str, Any], name: str) -> None:
    plan = runs[name]
    assert plan["coverage"] == "exact"
    for row in read_rows(work / "runs" / name):
        assert row["sync/received_bytes"] == plan["received_bytes"]
        assert row["sync/lower_bound_bytes"] == plan["lower_bound_bytes"]
        assert row["sync/network_bytes"] == row["sync/network_bound_bytes"] == plan["network_bytes"] > 0
        assert row["sync/max_staging_bytes"] == plan["max_staging_bytes"]
        assert row["sync/max_finalize_bytes"] <= plan["max_finalize_bytes"]


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.fixture
def dice() -> random.Random:
    seed = int(os.environ.get("KILL_SEED") or time.time())
    print(f"the same once more: KILL_SEED={seed}")
    return random.Random(seed)


def assert_repeats(work: Path, killed: Path) -> None:
    """A run that was killed, and brought to its end since, has left what one has that was not."""
    whole = work / "runs/wide"
    assert without(read_rows(killed)) == without(read_rows(whole))
    assert (killed / "samples.jsonl").read_bytes() == (whole / "samples.jsonl").read_bytes()


@pytest.mark.slow
def test_run_that_is_killed_while_it_writes_a_checkpoint(work: Path, runs: dict[str, Any], dice: random.Random) -> None:
    """And then the checkpoint before that is damaged. Kills at random moments: `test_runs_that_are_killed_...`."""
    run, arguments = work / "killed/wide", [*uneven("wide", 64), "run.dir=killed", "run.checkpoint_every=1"]
    arguments += ["run.async_checkpoints=true"]
    checkpoints = [run / f"checkpoints/step-{step:06d}" for step in range(STEPS + 1)]
    assert start_and_kill(work, arguments, run, writing(STEPS), dice.uniform(0, 0.05))
    assert Path(f"{checkpoints[STEPS]}.partial").exists()
    timeline = read_timeline(run / "timeline.json")
    assert timeline is not None
    assert (timeline.step, len(timeline.ranks)) == (STEPS - 1, 4)
    damaged = checkpoints[STEPS - 1]
    flip_a_byte(damaged / "__2_1.distcp")
    hybrid3d(work, "train", *arguments)
    assert_repeats(work, run)
    events = read_events(run)
    assert [e["step"] for e in events if e["event"] == "resume"][-1] == STEPS - 2
    broken = [e for e in events if e["event"] == "checkpoint_broken"]
    assert [(e["step"], Path(e["path"]).name) for e in broken] == [(STEPS - 1, f"{damaged.name}.broken")]
    assert re.search(r"__2_1\.distcp has CRC-32 [0-9a-f]{8}, written was [0-9a-f]{8}", broken[0]["why"])
    there = [path.name for path in damaged.parent.iterdir()]
    assert sorted(there) == sorted([f"{damaged.name}.broken", *(path.name for path in checkpoints[1:])])


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_runs_that_are_killed_twenty_times(work: Path, runs: dict[str, Any], dice: random.Random) -> None:
    run, arguments = work / "often/wide", [*uneven("wide", 64), "run.dir=often"]
    for kill in range(20):
        moment = (writing(dice.choice([RESUMED_FROM, STEPS])), 0.0) if kill % 4 == 3 else some_moment(dice, STEPS)
        if not start_and_kill(work, arguments, run, *moment) or kill == 19:
            hybrid3d(work, "train", *arguments)
            assert_repeats(work, run)
            assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step-000002", "step-000003"]
            shutil.rmtree(run)


def test_eval_and_export_agree_with_plain_engines(work: Path, runs: dict[str, Any]) -> None:
    reported = read_rows(work / "runs/wide")[-1]["eval/accuracy"]
    printed = hybrid3d(work, "eval", "runs/wide")
    assert f"{reported:.4f}" in printed
    hybrid3d(work, "export", "runs/wide", "exported")
    data = work / "build/demo/eval.parquet"
    plain = {e: answers_of(work, e, work / "exported", data, MAX_NEW_TOKENS) for e in ("transformers", "vllm")}
    assert plain["transformers"]["tokens"] == plain["vllm"]["tokens"]
    assert plain["transformers"]["accuracy"] == plain["vllm"]["accuracy"] == reported


def placed(name: str, *overrides: str) -> list[str]:
    """TP4 trains and TP2 generates: on consecutive ranks half of them would want a part that others hold."""
    return [*settings(name, 64), "train.tp=4", "train.pp=1", "run.steps=1", "run.eval_every=9", *overrides]


@pytest.mark.slow
def test_run_is_placed_as_planned_and_receives_less(work: Path) -> None:
    plans = {
        where: json.loads(hybrid3d(work, "plan", *placed("placed", f"debug.placement={where}"), "--json"))
        for where in ("overlap", "consecutive")
    }
    hybrid3d(work, "train", *placed("placed"))
    for row in read_rows(work / "runs/placed"):
        assert row["sync/received_bytes"] == row["sync/lower_bound_bytes"] == plans["overlap"]["received_bytes"]
        assert row["sync/max_staging_bytes"] == plans["overlap"]["max_staging_bytes"]
        assert row["mismatch/logprob_abs_max"] <= 1e-3
    consecutive = plans["overlap"]["placement"]["consecutive"]["received_bytes"]
    assert plans["overlap"]["received_bytes"] < consecutive == plans["consecutive"]["received_bytes"]


@pytest.mark.slow
def test_placement_changes_nothing_but_what_moves(work: Path) -> None:
    rows = {}
    for where in ("overlap", "consecutive"):
        hybrid3d(work, "train", *placed(where, f"debug.placement={where}"))
        moved = ("sync/received_bytes", "sync/lower_bound_bytes", "sync/max_staging_bytes")
        rows[where] = without(read_rows(work / "runs" / where), *moved)
    assert rows["overlap"] == rows["consecutive"]


def test_model_that_does_not_fit_is_refused_before_ranks_start(work: Path) -> None:
    said = hybrid3d(work, "train", *settings("large", 64), "machine.memory_gb=0.005", expect=2)
    assert said == ""
    assert not (work / "runs/large").exists()
