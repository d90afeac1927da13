"""Two engines that do not compute the same model: a run says so at its first step, before it learns anything."""

from __future__ import annotations

import math
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pyarrow.parquet as pq
import pytest

import warm_python
from commands import ROOT, experts_folder, read_events, read_rows
from hybrid3d.config import load_recipe
from hybrid3d.config.sections.learning import Guard as Settings
from hybrid3d.run.health import MAX_EXPLAINED_MISMATCH, EngineMismatch, Guard
from hybrid3d.run.logger import RunLogger
from run_ranks import environment
from test_health import Events, Watched

# ---- the guard alone


def guard_of(dtype: str = "float32", **settings: Any) -> tuple[Watched, Events]:
    events = Events()
    recipe = load_recipe(ROOT / "recipes/demo-cpu.yaml", [f"model.dtype={dtype}"])
    return Watched(Guard(cast(RunLogger, events)), replace(recipe, guard=Settings(**settings))), events


def row(mean: float) -> dict[str, float]:
    return {f"mismatch/logprob_abs_{name}": value for name, value in (("mean", mean), ("p99", 1.5), ("max", 8.2))}


@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bound_is_the_dtypes(dtype: str, experts: bool) -> None:
    bound = MAX_EXPLAINED_MISMATCH[dtype][experts]
    for mean in (0.0, bound):
        guard, events = guard_of(dtype)
        guard.compare_engines(0, row(mean), experts=experts)
        assert events.events == []
        assert not guard.must_compare_engines()  # once a process
    for mean in (bound * 1.001, math.inf, math.nan):
        guard, events = guard_of(dtype)
        with pytest.raises(EngineMismatch) as caught:
            guard.compare_engines(7, row(mean), experts=experts)
        assert caught.value.raised_on_all_ranks
        said = str(caught.value)
        assert events.said == [""]  # the error says it
        assert "step 7: training and vLLM do not compute the same model: " in said
        assert f"differ by {mean:.4g} nats on average (p99 1.5, maximum 8.2)" in said
        assert f"model.dtype={dtype} explains at most {bound:g}" in said
        ((event, fields),) = events.events
        assert (event, fields["step"], fields["mean"], fields["bound"]) == ("engines_disagree", 7, str(mean), bound)


# What was measured, in nats, of two steps each: `docs/algorithms.md`.
MEASURED = {
    ("float32", False): 2.6e-6,
    ("float32", True): 5.2e-6,
    ("bfloat16", False): 0.052,
    ("bfloat16", True): 0.191,
}


@pytest.mark.parametrize(("dtype", "experts"), MEASURED)
def test_bounds_leave_room_for_what_sound_engines_differ_by(dtype: str, experts: bool) -> None:
    assert 2 * MEASURED[dtype, experts] < MAX_EXPLAINED_MISMATCH[dtype][experts]


def test_run_may_go_on_all_the_same() -> None:
    guard, events = guard_of(initial_mismatch="warn")
    guard.compare_engines(0, row(3.0), experts=True)
    assert [event for event, _ in events.events] == ["engines_disagree"]
    assert events.said[0].startswith("step 0: training and vLLM do not compute the same model")
    assert events.said[0].endswith("The run continues anyway")
    guard, events = guard_of(initial_mismatch="ignore")
    assert not guard.must_compare_engines()


def test_resumed_run_is_judged_again() -> None:
    guard, _ = guard_of()
    guard.compare_engines(0, row(0.0), experts=False)
    resumed, _ = guard_of()
    resumed.restore(guard.progress)
    assert resumed.must_compare_engines()


# ---- real runs

# Training takes another temperature than vLLM samples at.
OTHER_TEMPERATURE = """
import os, sys
if os.environ.get("RANK") and "hybrid3d" in sys.orig_argv:  # not in processes of rewards
    from hybrid3d.train.megatron import policy
    policy._temperature = lambda recipe: 0.5
"""

REWARD = """
def reward(answer, reference, prompt):
    return len(answer) / 100
"""

BROKEN_REWARD = """
def reward(answer, reference, prompt):
    raise KeyError("nothing works")
"""

SETTINGS = [
    *("name=run", "model.path=model", "data.eval=eval.parquet", "reward.name=mine:reward"),
    *("train.tp=1", "train.pp=1", "train.dp=2", "rollout.tp=1", "algorithm.prompts_per_step=8"),
    *("algorithm.samples_per_prompt=4", "algorithm.kl={where: none}"),
    *("run.steps=1", "run.eval_every=9", "train.micro_batch_size=16"),
]


@pytest.fixture
def work(demo: Path, tmp_path: Path) -> Path:
    experts_folder(tmp_path, demo, "qwen2")  # whose wide weights make sharp distributions: a temperature counts
    (tmp_path / "fault").mkdir()
    (tmp_path / "fault" / "sitecustomize.py").write_text(OTHER_TEMPERATURE)
    (tmp_path / "mine.py").write_text(REWARD)
    pq.write_table(pq.read_table(demo / "eval.parquet").slice(0, 8), tmp_path / "eval.parquet")
    return tmp_path


def run(work: Path, *arguments: str, expect: int, fault: bool = False) -> str:
    """A command of hybrid3d, with or without the fault; what it said."""
    path = environment("")["PYTHONPATH"]
    variables = {"PYTHONPATH": f"{work / 'fault'}:{path}" if fault else path, "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(
        [warm_python.executable(), "-m", "hybrid3d", *arguments],
        cwd=work, env=environment("", **variables), capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    said = done.stdout + done.stderr
    assert done.returncode == expect, said
    assert "Traceback" not in said
    return said


def train(work: Path, *settings: str, expect: int, fault: bool = False) -> str:
    arguments = ["train", str(ROOT / "recipes/demo-cpu.yaml"), *SETTINGS, *settings]
    return run(work, *arguments, expect=expect, fault=fault)


def events_of(work: Path, event: str) -> list[dict[str, Any]]:
    events = read_events(work / "runs/run")
    return [one for one in events if one["event"] == event]


@pytest.mark.engines
@pytest.mark.timeout(600)
def test_differing_temperature_stops_the_run_before_it_learns(work: Path) -> None:
    said = train(work, expect=1, fault=True)
    assert said.count("stopped: step 0: training and vLLM do not compute the same model") == 1
    assert "failed" not in said
    (event,) = events_of(work, "engines_disagree")
    assert float(event["mean"]) > event["bound"] == MAX_EXPLAINED_MISMATCH["float32"][False]
    assert not (work / "runs/run").joinpath("metrics.jsonl").read_text()
    assert not list((work / "runs/run").glob("checkpoints/step-*"))


@pytest.mark.slow
@pytest.mark.engines
@pytest.mark.timeout(1800)
def test_engines_and_rewards_that_break_between_two_starts(work: Path) -> None:
    """A run that was sound is judged anew when it is resumed, and its rewards when it is evaluated."""
    train(work, expect=0)
    rows = read_rows(work / "runs/run")
    assert all(0 < one["mismatch/logprob_abs_mean"] <= one["mismatch/logprob_abs_max"] < 1e-3 for one in rows)
    assert events_of(work, "engines_disagree") == []
    (work / "mine.py").write_text(BROKEN_REWARD)
    said = run(work, "eval", "runs/run", expect=1)
    assert "stopped: 8 of 8 rewards failed on held-out problems: 8 raised (row 0: KeyError: 'nothing works')" in said
    assert "data.eval eval.parquet: all 8 rows are used" in said
    (work / "runs/run/control.yaml").write_text("{run.steps: 3, run.eval_every: 9}")
    said = train(work, expect=1)
    assert (
        len(re.findall(r"stopped: 32 of 32 rewards failed: 32 raised \(row \d+: KeyError: 'nothing works'\)", said))
        == 1
    )
    (work / "mine.py").write_text(REWARD)
    said = train(work, expect=1, fault=True)
    assert said.count("stopped: step 1: training and vLLM do not compute the same model") == 1
    assert [path.name for path in (work / "runs/run/checkpoints").iterdir()] == ["step-000001"]
    (work / "runs/run/control.yaml").write_text("{run.steps: 2, guard.initial_mismatch: warn}")
    train(work, expect=0, fault=True)
    assert [one["step"] for one in events_of(work, "engines_disagree")] == [1, 1]
    assert [one["step"] for one in read_rows(work / "runs/run")] == [0, 1, 2]
