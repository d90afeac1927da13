"""Runs that sample from a truncated distribution, and evaluate with several answers per problem on two files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from commands import ROOT, demo_folder, hybrid3d, read_events, read_rows

pytestmark = [pytest.mark.engines, pytest.mark.processes, pytest.mark.timeout(600)]

PROBLEMS = 16
REWARD = """\
def letters(answer, reference, prompt):
    return float(any(letter in answer for letter in "567"))  # which a model that was not trained writes at times
"""
SETTINGS = [
    *("model.path=build/demo/base", "reward.name=mine:letters", "data.eval=easy.parquet"),
    *("train.tp=1", "train.pp=1", "rollout.tp=1", "run.steps=1", "train.micro_batch_size=16"),
    *("algorithm.prompts_per_step=4", "algorithm.samples_per_prompt=4", "rollout.kv_cache_gib=0.0625"),
    *("rollout.top_p=0.8", "rollout.stop=['q', 'z']", "rollout.max_new_tokens=16"),
    *("evaluation.samples=4", "evaluation.temperature=0.7", "evaluation.k=[1,2,4]"),
    "evaluation.data.hard=hard.parquet",
]


def prepare(folder: Path, demo: Path) -> Path:
    demo_folder(folder, demo)
    (folder / "mine.py").write_text(REWARD)
    for name, source in (("easy", "eval"), ("hard", "warmup")):
        pq.write_table(pq.read_table(demo / f"{source}.parquet").slice(0, PROBLEMS), folder / f"{name}.parquet")
    return folder


def train(folder: Path, name: str, *more: str) -> None:
    hybrid3d(folder, "train", str(ROOT / "recipes/demo-cpu.yaml"), f"name={name}", *SETTINGS, *more)


@pytest.fixture(scope="module")
def work(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = prepare(tmp_path_factory.mktemp("evaluation"), demo)
    train(folder, "sampled", "run.record=always")
    return folder


def of_evaluation(row: dict[str, Any]) -> dict[str, float]:
    return {key: value for key, value in row.items() if key.startswith("eval/")}


def test_metrics_of_four_answers_to_the_problems_of_two_files(work: Path) -> None:
    rows = read_rows(work / "runs/sampled")
    assert [row["step"] for row in rows] == [0, 1]  # before and after
    for row in rows:
        found = of_evaluation(row)
        names = ("accuracy", "reward", "mean@4", "pass@1", "pass@2", "pass@4")
        assert [*found] == [f"{prefix}{name}" for prefix in ("eval/", "eval/hard/") for name in names]
        for prefix in ("eval/", "eval/hard/"):
            one, two, four = (found[f"{prefix}pass@{k}"] for k in (1, 2, 4))
            assert 0 < one < two < four < 1
            assert found[f"{prefix}accuracy"] == found[f"{prefix}mean@4"] == pytest.approx(one)
            assert (found[f"{prefix}accuracy"] * 4 * PROBLEMS).is_integer()
            assert (four * PROBLEMS) == pytest.approx(round(four * PROBLEMS))
        assert (row["data/eval_used"], row["data/hard_used"]) == (PROBLEMS, PROBLEMS)


def test_samples_are_truncated_and_trained_with_the_whole_distribution(work: Path) -> None:
    for row in read_rows(work / "runs/sampled"):
        assert 0.8 <= row["rollout/kept_probability_mean"] < 0.9  # hardly more than top_p, as the model is not trained
        assert 0 < row["mismatch/logprob_abs_max"] <= 1e-3
    events = read_events(work / "runs/sampled")
    told = [event for event in events if event["event"] == "sampling_truncated"]
    assert [(event["step"], event["top_p"]) for event in told] == [(0, 0.8)]
    samples = [json.loads(line) for line in (work / "runs/sampled/samples.jsonl").read_text().splitlines()]
    for sample in samples:
        assert not any(stop in sample["answer"][:-1] for stop in ("q", "z"))


@pytest.mark.slow
def test_eval_measures_the_same_of_the_checkpoint(work: Path) -> None:
    last = of_evaluation(read_rows(work / "runs/sampled")[-1])
    found = json.loads(hybrid3d(work, "eval", "runs/sampled", "--json"))
    assert found["metrics"] == last
    assert (found["step"], found["problems"]) == (1, {"eval": PROBLEMS, "hard": PROBLEMS})
    printed = hybrid3d(work, "eval", "runs/sampled", "evaluation.samples=2", "evaluation.k=[2]")
    assert f"of {PROBLEMS} problems" in printed
    assert "eval/hard/pass@2 " in printed
    assert "pass@4" not in printed
    hybrid3d(work, "eval", "runs/sampled", "evaluation.samples=1", "evaluation.k=[]", "evaluation.temperature=0")
    hybrid3d(work, "eval", "runs/sampled", "evaluation.samples=2", expect=2)  # pass@4 of two answers
    hybrid3d(work, "eval", "runs/sampled", "rollout.top_p=1", expect=2)
    hybrid3d(work, "replay", "runs/sampled", "--step", "0")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("split", ["roles.generation.ranks=1", "async.max_staleness=1", "algorithm.correction.kind=truncate"]),
        ("partial", ["async.max_staleness=1", "async.partial=continue", "algorithm.correction.kind=truncate"]),
        ("environment", ["rollout.environment=calculator"]),
        ("scored", ["roles.reward.ranks=1"]),
    ],
)
def test_generation_by_other_ways_carries_the_same_settings(work: Path, name: str, more: list[str]) -> None:
    train(work, name, *more)
    first, other = read_rows(work / "runs/sampled")[0], read_rows(work / f"runs/{name}")[0]
    if name != "environment":  # whose replies are in the answers
        assert of_evaluation(other) == of_evaluation(first)
    assert 0.8 <= other["rollout/kept_probability_mean"] < 0.9
    assert 0 < other["mismatch/logprob_abs_max"] <= 1e-3
    samples = [json.loads(line) for line in (work / f"runs/{name}/samples.jsonl").read_text().splitlines()]
    assert not any(stop in sample["answer"][:-1] for stop in ("q", "z") for sample in samples)
