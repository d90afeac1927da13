"""Partial rollouts with the real engines: an answer in pieces, and runs whose steps do not wait for long answers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from checkpoints import make_checkpoint
from commands import demo_folder, hybrid3d, read_rows
from run_ranks import ROOT, run_ranks

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]


def test_answer_in_pieces_is_the_answer(tmp_path: Path) -> None:
    """Greedy answers are the same; of sampled ones, the first piece is, or all of it if the cache is kept."""
    make_checkpoint(tmp_path / "model", "qwen3", seed=1)
    run_ranks(ROOT / "tests/jobs/partial.py", 4, [str(tmp_path / "model"), str(tmp_path)], timeout=300)
    said: list[Any] = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    assert [one.pop("broadcast") for one in said] == ["of rank 0", "of rank 0", "of rank 2", "of rank 2"]
    assert (said[0], said[2]) == (said[1], said[3])  # ranks of a replica agree
    for one in said:
        assert "no sync has finished" in one["stale"]
        assert one["greedy"]["interrupted"] > 10
        assert len(one["many"]) == 200
        for pieces, whole, _, _ in one["greedy"]["pairs"]:
            assert pieces == whole
        for pieces, whole, some, all_of_them in one["sampled"]["pairs"]:
            assert pieces[:5] == whole[:5]
            assert some[:5] == pytest.approx(all_of_them[:5], abs=1e-5)
            assert len(some) == len(pieces)
        assert one["paused"]["interrupted"] > 10
        for pieces, whole, some, all_of_them in one["paused"]["pairs"]:  # vLLM goes on with the request's own generator
            assert pieces == whole
            assert some == pytest.approx(all_of_them, abs=1e-4)


SHORT = ["model.path=build/demo/base", "train.pp=1", "rollout.tp=1", "guard.initial_mismatch=ignore"]
PARTIAL = ["async.partial=continue", "async.max_staleness=2", "algorithm.correction.kind=truncate"]

# An environment that lets an answer go on for up to 30 tokens, as the prompt says
TALK = """
import string


def reply(turns, reference, prompt):
    said, longest = "".join(turns[::2]), len(prompt) ** 3 % 31
    return None if len(said) >= longest else "."


reply.stops = tuple(string.ascii_lowercase + string.digits)


def length(answer, reference, prompt):
    return float(len(answer) % 2)
"""


@pytest.fixture(scope="module")
def work(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = demo_folder(tmp_path_factory.mktemp("partial"), demo)
    (work / "talk.py").write_text(TALK)
    return work


def train(work: Path, *more: str) -> str:
    steps = [
        "run.steps=4",
        "run.eval_every=4",
        "run.checkpoint_every=2",
        "algorithm.prompts_per_step=16",
        "algorithm.samples_per_prompt=2",
    ]
    steps += ["rollout.max_new_tokens=40", "train.micro_batch_size=8", "rollout.environment=talk:reply"]
    steps += ["rollout.max_turns=40", "reward.name=talk:length"]
    recipe = str(ROOT / "recipes/demo-cpu.yaml")
    return hybrid3d(work, "train", recipe, *SHORT, *PARTIAL, *steps, *more, also=work)


def check(run: Path) -> None:
    rows = read_rows(run)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert max(row["rollout/staleness_max"] for row in rows) <= 2
    assert rows[0]["rollout/batches"] == 2
    assert [row["rollout/unfinished_prompts"] for row in rows] == [16] * 4 + [0]
    assert all(row["sync/received_bytes"] == row["sync/lower_bound_bytes"] for row in rows)
    for line in (run / "samples.jsonl").read_text().splitlines():
        sample = json.loads(line)
        versions = [version for version, _ in sample["versions"]]
        assert sum(tokens for _, tokens in sample["versions"]) == len(sample["answer_tokens"])
        assert sample["step"] - 2 <= sample["weights"] == versions[0] == min(versions)
        assert versions == sorted(set(versions))


@pytest.mark.slow
def test_run_whose_answers_go_on_over_syncs_resumes(work: Path) -> None:
    """Unfinished answers are not in a checkpoint: their prompts are drawn again."""
    train(work, "name=together")
    check(work / "runs/together")
    assert max(row["rollout/continued_fraction"] for row in read_rows(work / "runs/together")) > 0
    shutil.rmtree(work / "runs/together/checkpoints/step-000004")
    assert "resumed from runs/together/checkpoints/step-000002" in train(work, "name=together")
    check(work / "runs/together")
    assert read_rows(work / "runs/together")[2]["rollout/staleness_max"] == 0


@pytest.mark.slow
def test_partial_rollouts_on_ranks_of_their_own(work: Path) -> None:
    train(work, "name=split", "roles.generation.ranks=2")
    check(work / "runs/split")


@pytest.mark.slow
def test_answers_that_keep_their_cache(work: Path) -> None:
    """Over syncs that find requests paused, and over an evaluation, which ends them."""
    train(work, "name=kept", "run.eval_every=2", "async.partial=continue_with_cache", "rollout.sleep=false")
    check(work / "runs/kept")
    assert max(row["rollout/continued_fraction"] for row in read_rows(work / "runs/kept")) > 0
