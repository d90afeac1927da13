"""After a sync a live vLLM holds and computes, bit for bit, what it gets by loading the same checkpoint itself.

Real ranks, real Megatron, real vLLM: `jobs/sync.py` does the work, one launch per rollout TP; here it is judged.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from run_ranks import run_ranks

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1200)]

JOB = Path(__file__).parent / "jobs" / "sync.py"
# Tied embeddings and biases at every rollout TP, TP4 having fewer KV heads than ranks; the others once.
FAMILIES = {1: ("qwen2",), 2: ("qwen2", "llama", "qwen3"), 4: ("qwen2",)}
LAYOUTS = [[1, 1], [2, 1], [1, 2], [2, 2]]
SEEDS = (1, 2, 3)


@pytest.fixture(scope="module", params=sorted(FAMILIES), ids=lambda tp: f"rollout-tp{tp}")
def results(request: pytest.FixtureRequest, tiny_checkpoint: Callable[..., Path], tmp_path_factory: Any) -> list[dict]:
    """One result per rank, family and train layout."""
    out = tmp_path_factory.mktemp("sync") / "results.json"
    cases = [f"{f}={','.join(str(tiny_checkpoint(f, seed)) for seed in SEEDS)}" for f in FAMILIES[request.param]]
    run_ranks(JOB, 4, [str(out), str(request.param), *cases], timeout=1100)
    return json.loads(out.read_text())


def test_every_layout_was_proven(results: list[dict]) -> None:
    families = FAMILIES[results[0]["rollout_tp"]]
    seen = {(r["family"], tuple(r["train"]), r["rank"]) for r in results}
    assert seen == {(f, tuple(layout), rank) for f in families for layout in LAYOUTS for rank in range(4)}


@pytest.mark.parametrize("sync", ["sync1", "sync2"], ids=["second sync", "third sync"])
@pytest.mark.parametrize("what", ["loader_layout", "outputs", "logprobs"])
def test_bit_for_bit_as_freshly_loaded(results: list[dict], sync: str, what: str) -> None:
    for result in results:
        compared = result[sync][what]
        assert compared["elements"] > 0
        assert compared["wrong"] == [], (result["family"], result["train"], result["rank"])
        assert result[sync]["landed"] >= 40  # tensors seen before their finalization: not only live ones


def test_wrong_bytes_are_seen(results: list[dict]) -> None:
    """One flipped bit in each message that arrives: every rank that receives must see it, in loader layout."""
    receiving = [r for r in results if r["report"]["received_bytes"]]
    assert receiving
    for result in receiving:
        assert result["corrupted"]["loader_layout"]["wrong"], (result["family"], result["train"], result["rank"])
    assert any(r["corrupted"]["outputs"]["wrong"] for r in receiving)
    assert any(r["corrupted"]["logprobs"]["wrong"] for r in receiving)


def test_received_bytes_are_the_lower_bound(results: list[dict]) -> None:
    for result in results:
        assert result["report"]["received_bytes"] == result["report"]["lower_bound_bytes"]
    assert sum(r["report"]["received_bytes"] for r in results) > 0


def test_nothing_but_the_plan_moves(results: list[dict]) -> None:
    """Every c10d operation of a sync is one of the plan's sends and receives; nothing is gathered or broadcast."""
    for layout in LAYOUTS:
        for family in {r["family"] for r in results}:
            ranks = [r for r in results if r["train"] == layout and r["family"] == family]
            for result in ranks:
                assert result["c10d"].keys() <= {"c10d::send", "c10d::recv_"}
                assert result["c10d"].get("c10d::recv_", 0) == result["report"]["received_bytes"]
            sent = sum(r["c10d"].get("c10d::send", 0) for r in ranks)
            assert sent == sum(r["report"]["received_bytes"] for r in ranks)


def test_staging_is_two_small_buckets_and_a_box_is_split(results: list[dict]) -> None:
    """At TP2 x PP2 the job's bucket is smaller than the largest boxes, a twentieth of a rank's share or so."""
    for result in results:
        if result["train"] == [2, 2]:
            assert result["report"]["staging_bytes"] <= 2 * result["bucket_bytes"]
            assert result["report"]["received_bytes"] > 4 * result["bucket_bytes"]
            assert result["split_boxes"] > 0, result["rank"]
