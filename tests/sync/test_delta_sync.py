"""After a sync of changed elements vLLM holds and computes, bit for bit, what a dense sync gives it.

Real ranks, real Megatron with real updates in bfloat16, real vLLM: `jobs/delta_sync.py`. That a dense sync gives what
vLLM loads itself is the subject of `test_sync.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import checkpoints
from run_ranks import RanksFailed, run_ranks

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1200)]

JOB = Path(__file__).parents[1] / "jobs" / "delta_sync.py"


def run(out: Path, tp: int, syncs: int, mode: str, folders: dict[str, Path]) -> dict[str, list[list[dict]]]:
    """Return the results by family and rank."""
    cases = [f"{family}={folder}" for family, folder in folders.items()]
    run_ranks(JOB, 4, [str(out), str(tp), str(syncs), mode, *cases], timeout=1100)
    by_rank = json.loads(out.read_text())
    return {family: [results[family] for results in by_rank] for family in folders}


def assert_exact(result: dict) -> None:
    for what in ("landed", "live", "outputs", "logprobs"):
        assert result[what]["elements"] > 0
        assert result[what]["wrong"] == [], (what, result["what"], result["rank"], result["train"])


def assert_right(results: list[list[dict]]) -> None:
    """Judge the syncs of one family: exact, sparse, near their entropy, with every change tracked."""
    for of_rank in results:
        assert [r["dense_reason"] for r in of_rank if r["what"] == "first"] == [
            "it is the first sync of these processes"
        ] * 2
        later = [r for r in of_rank if r["what"] != "first"]
        assert {r["what"] for r in later} == {"changes", "overlapped"}
        for result in later:
            assert (result["dense_reason"], result["corrupted"]) == ("", [])
            changed, elements = result["changed"]
            assert 0 < changed < 0.2 * elements
            for tracked in (result["tracked"], result["tracked_again"]):
                assert tracked["missed"] == 0
            assert result["tracked"]["extra"] == 0
            if "landed" in result:
                assert_exact(result)
    for syncs in zip(*results, strict=True):
        if "dense_bytes" in syncs[0]:
            assert sum(r["received_bytes"] for r in syncs) <= sum(r["dense_bytes"] for r in syncs)
            network = sum(r["dense_network_bytes"] for r in syncs)
            assert sum(r["network_bytes"] for r in syncs) <= network == sum(r["network_bound_bytes"] for r in syncs) > 0


@pytest.mark.parametrize("family", ["qwen2"])
def test_dense_model(family: str, tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Tied embeddings and biases; nearly everything is sent sparsely, within 10 % of its entropy."""
    results = run(tmp_path / "out.json", 2, 3, "plain", {family: tiny_checkpoint(family)})[family]
    assert_right(results)
    for syncs in zip(*results, strict=True):
        if syncs[0]["what"] != "first":
            bound = sum(result["delta_bound_bytes"] for result in syncs)
            assert bound <= sum(result["received_bytes"] for result in syncs) <= 1.1 * bound


@pytest.mark.parametrize("family", ["deepseek_v3"])
def test_experts_and_latent_attention(family: str, tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Both ranks of a node want the whole model, so that one hands on to the other half of what comes from afar.

    vLLM computes its experts with torch, from weights as they are loaded, so that they are sent sparsely.
    """
    results = run(tmp_path / "out.json", 1, 2, "plain", {family: tiny_checkpoint(family)})[family]
    assert_right(results)
    for syncs in zip(*results, strict=True):
        if "dense_bytes" in syncs[0]:
            assert sum(r["received_bytes"] for r in syncs) < 0.25 * sum(r["dense_bytes"] for r in syncs)


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("family", [*checkpoints.DENSE, *checkpoints.SPARSE])
def test_delta_sync_is_exact_two_hundred_times(
    family: str, tp: int, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Ten families, two rollout layouts and two train layouts each, 7 syncs of every one: 280."""
    assert_right(run(tmp_path / "out.json", tp, 7, "plain", {family: tiny_checkpoint(family)})[family])


def test_delta_sync_finds_what_can_go_wrong(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    with pytest.raises(RanksFailed, match="failed with exit code"):
        run(out, 2, 1, "faults", {"qwen2": tiny_checkpoint("qwen2")})
    by_rank = [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(3)]
    for results in by_rank:
        said = {r["what"]: r for r in results if "what" in r}
        for what in ("skipped update", "changed by hand", "loaded", "a flipped bit"):
            assert_exact(said[what])
        assert (said["skipped update"]["changed"][0], said["skipped update"]["dense_reason"]) == (0, "")
        for what in ("changed by hand", "loaded"):
            assert said[what]["dense_reason"] == "weights were changed by something else than the optimizer"
        assert len(said["a flipped bit"]["corrupted"]) >= 1
        error, refusal = results[-1]["killed"]
        assert error in ("RuntimeError", "DistBackendError")
        assert refusal.startswith("vLLM's weights are incomplete")


@pytest.mark.slow
def test_cpu_whose_ranks_share_memory_sends_all_elements(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Encoding and sockets take longer than copies: measured, 1.7 to 8 times (`benchmarks/results/reshard-cpu.md`)."""
    results = run(tmp_path / "out.json", 2, 2, "auto", {"qwen2": tiny_checkpoint("qwen2")})["qwen2"]
    for syncs in zip(*results, strict=True):
        choices = [{key: value for key, value in r["choice"].items() if key != "exposed_seconds"} for r in syncs]
        assert choices == choices[:1] * 4  # the ranks agree
        if syncs[0]["what"] != "first":
            assert choices[0]["sends"] == "all elements"
            assert choices[0]["expected_dense_seconds"] < choices[0]["expected_delta_seconds"]
            assert {r["dense_reason"] for r in syncs} == {"a sync of changed elements is expected to take longer"}
            for result in syncs:
                assert_exact(result)
