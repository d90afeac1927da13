"""After a sync a live vLLM holds and computes, bit for bit, what it gets by loading the same checkpoint itself.

Real ranks, real Megatron, real vLLM: `jobs/sync.py` does the work, one launch per rollout TP; here it is judged.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

import checkpoints
from hybrid3d.config import load_recipe
from hybrid3d.families import family_of
from hybrid3d.inputs.models import read_config
from hybrid3d.planning.engine_queries import query_engines
from hybrid3d.planning.traffic import compute_sync_traffic
from reference import tensors_in
from run_ranks import run_ranks

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1200)]

JOB = Path(__file__).parents[1] / "jobs" / "sync.py"
# Rollout TP, families, dtype and the slot of each rank in each launch. Tied embeddings and biases at every TP, TP4
# having fewer KV heads than ranks; every family at TP2. Models with experts have launches of their own: vLLM makes its
# groups once a process.
LAUNCHES: dict[str, tuple[int, tuple[str, ...], str, tuple[int, ...]]] = {
    "tp1": (1, ("qwen2",), "float32", (2, 3, 1, 0)),
    "tp2": (2, ("qwen2", "qwen3"), "float32", (0, 1, 2, 3)),
    "tp2-llama": (2, ("llama",), "float32", (0, 1, 2, 3)),
    "tp4": (4, ("qwen2",), "float32", (2, 0, 3, 1)),
    "tp1-experts": (1, ("qwen3_moe", "deepseek_v3"), "float32", (0, 1, 2, 3)),
    "tp2-experts": (2, ("qwen3_moe", "deepseek_v3"), "float32", (3, 0, 2, 1)),
    "tp2-more": (2, ("mixtral", "deepseek_v2", *checkpoints.MORE), "float32", (0, 3, 1, 2)),
    # GLM's routers are float32 in vLLM only
    "tp2-bfloat16": (2, ("deepseek_v3", "glm4_moe"), "bfloat16", (0, 2, 1, 3)),
}
SEEDS = (1, 2, 3)
KINDS = {"model.embed_tokens.weight": "embedding", "lm_head.weight": "head"}  # of the outputs; the rest are of linears
SYNCS = {"sync1": "second sync", "sync2": "third sync", "sync11": "twelfth sync"}
QUICK = ("tp2", "tp2-experts")  # the others in make test-all; test_grid has every layout by value


@pytest.fixture(
    scope="module", params=[pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in LAUNCHES]
)
def results(request: pytest.FixtureRequest, tiny_checkpoint: Callable[..., Path], tmp_path_factory: Any) -> list[dict]:
    """One result per rank, family and train layout."""
    tp, families, dtype, slots = LAUNCHES[request.param]
    out = tmp_path_factory.mktemp("sync") / "results.json"
    folder_of = tiny_checkpoint if dtype == "float32" else functools.partial(rounded, tiny_checkpoint, out.parent)
    cases = [f"{family}={','.join(str(folder_of(family, seed)) for seed in SEEDS)}" for family in families]
    run_ranks(JOB, 4, [str(out), str(tp), dtype, json.dumps(slots), *cases], timeout=1100)
    results = json.loads(out.read_text())
    expected = [family for family in families for _ in range(4 if tp == 2 and family in checkpoints.DENSE else 2)]
    assert sorted(case[0]["family"] for case in cases_of(results)) == sorted(expected)
    assert all(sorted(result["rank"] for result in case) == [0, 1, 2, 3] for case in cases_of(results))
    return results


def rounded(tiny_checkpoint: Callable[..., Path], out: Path, family: str, seed: int) -> Path:
    """A tiny checkpoint whose weights are those of bfloat16, as published ones are, but for the biases of routers.

    vLLM keeps GLM's routers in float32, and Megatron trains them in bfloat16.
    """
    folder = shutil.copytree(tiny_checkpoint(family, seed), out / f"{family}-{seed}")
    weights = {
        name: tensor if name.endswith("e_score_correction_bias") else tensor.bfloat16().float()
        for name, tensor in tensors_in(folder).items()
    }
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def cases_of(results: list[dict]) -> list[list[dict]]:
    """The results of all ranks, by family and train layout."""
    cases: dict[tuple[str, str], list[dict]] = {}
    for result in results:
        cases.setdefault((result["family"], str(result["train"])), []).append(result)
    return list(cases.values())


@pytest.mark.parametrize("sync", SYNCS, ids=SYNCS.values())
@pytest.mark.parametrize("what", ["loader_layout", "outputs", "logprobs"])
def test_bit_for_bit_as_freshly_loaded(results: list[dict], sync: str, what: str) -> None:
    judged = [result for result in results if sync in result]
    assert {result["family"] for result in judged} == {result["family"] for result in results}
    for result in judged:
        compared = result[sync][what]
        assert compared["elements"] > 0
        assert compared["wrong"] == [], (result["family"], result["train"], result["rank"])
        assert result[sync]["landed"] >= 40  # tensors seen before their finalization: not only live ones


def test_comparison_covers_all_that_computes(results: list[dict], tiny_checkpoint: Callable[..., Path]) -> None:
    """What there is to compare is read from the checkpoint: it cannot vanish by a name that vLLM changes."""
    for result in results:
        folder = tiny_checkpoint(result["family"], SEEDS[0])
        config = read_config(folder)
        experts, latents = family_of(config).experts(config), family_of(config).latents(config)
        layers = list(range(config["num_hidden_layers"]))
        sparse = [layer for layer in layers if experts and experts.sparse[layer]]
        assert (sparse != []) == (result["family"] in checkpoints.SPARSE)
        assert (latents is not None) == (result["family"] in checkpoints.LATENT)
        matrices = {name for name, tensor in tensors_in(folder).items() if tensor.dim() == 2}
        assert result["matrices"].keys() == matrices
        for sync in SYNCS.keys() & result.keys():
            compared = defaultdict(list, result[sync]["outputs"]["modules"])
            for matrix in matrices:
                if ".experts." not in matrix:  # those of experts are in blocks
                    assert set(result["matrices"][matrix]) <= set(compared[KINDS.get(matrix, "linear")]), matrix
            assert len(compared["embedding"]) == len(compared["head"]) == 2  # a tied one has two names
            assert layers_of(compared["block"]) == sparse
            for derived in ("W_UV", "W_UK_T"):
                assert layers_of(compared[derived]) == (layers if latents else [])


def layers_of(modules: list[str]) -> list[int]:
    return sorted(int(re.search(r"\.layers\.(\d+)\.", module)[1]) for module in modules)


def test_wrong_bytes_are_seen(results: list[dict]) -> None:
    """One flipped bit in each message that arrives or is lent: all that receive must see it, in loader layout."""
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


def test_network_bytes_are_their_bound(results: list[dict]) -> None:
    """Two ranks share a node; what both of them lack comes from the other node once."""
    for case in cases_of(results):
        reports = [result["report"] for result in case]
        assert sum(r["network_bytes"] for r in reports) == sum(r["network_bound_bytes"] for r in reports)
    assert sum(result["relayed_bytes"] for result in results) > 0


def test_sync_moves_nothing_but_the_plan(results: list[dict]) -> None:
    """Every c10d operation of a sync is one of the plan's sends and receives; nothing is gathered or broadcast.

    All else that a rank receives it copies out of the memory of ranks of its node.
    In bfloat16 the ranks also agree, by one number, on whether only changed elements are sent.
    """
    for case in cases_of(results):
        for result in case:
            assert result["c10d"].pop("c10d::allreduce_", 0) <= (8 if result["dtype"] == "bfloat16" else 0)
            assert result["c10d"].keys() <= {"c10d::send", "c10d::recv_"}
            borrowed = sum(result["borrowed"].values())
            assert result["c10d"].get("c10d::recv_", 0) + borrowed == result["report"]["received_bytes"]
            assert set(result["borrowed"]) <= {str(result["rank"] ^ 1)}
        sent = sum(result["c10d"].get("c10d::send", 0) for result in case)
        lent = sum(sum(result["borrowed"].values()) for result in case)
        assert sent + lent == sum(result["report"]["received_bytes"] for result in case)
    assert sum(sum(result["borrowed"].values()) for result in results) > 0


def test_plan_says_what_is_measured(results: list[dict], tmp_path: Path) -> None:
    """Of every rank, byte for byte, from the recipe alone, though vLLM's ranks are placed in some other order."""
    for case in cases_of(results):
        (tmp_path / "recipe.yaml").write_text(case[0]["recipe"])
        recipe = load_recipe(tmp_path / "recipe.yaml")
        plan = compute_sync_traffic(recipe, query_engines(recipe, read_config(recipe.model.path)), case[0]["slots"])
        by_rank = sorted(case, key=lambda result: result["rank"])
        assert [result["report"]["received_bytes"] for result in by_rank] == plan.traffic.sum(0).tolist()
        sent = [result["c10d"].get("c10d::send", 0) for result in by_rank]
        lent = [sum(other["borrowed"].get(str(result["rank"]), 0) for other in by_rank) for result in by_rank]
        assert [sum(both) for both in zip(sent, lent, strict=True)] == plan.traffic.sum(1).tolist()
        assert [result["report"]["lower_bound_bytes"] for result in by_rank] == plan.lower_bound.tolist()
        assert sum(result["report"]["network_bytes"] for result in by_rank) == plan.network_bound
        assert max(result["report"]["staging_bytes"] for result in case) == plan.staging
        assert max(result["report"]["finalize_bytes"] for result in case) <= plan.finalize


def test_engines_say_the_same(results: list[dict]) -> None:
    for case in cases_of(results):
        differences = [result["mismatch"] for result in case if result["mismatch"] is not None]
        assert differences
        if case[0]["dtype"] == "float32":  # in bfloat16 rounding alone sends tokens to other experts
            assert max(differences) <= 1e-3, (case[0]["family"], case[0]["train"])


def test_tensors_keep_their_addresses(results: list[dict]) -> None:
    for result in results:
        assert result["moved"] == [], (result["family"], result["train"])


def test_staging_is_two_small_buckets_and_a_box_is_split(results: list[dict]) -> None:
    """In the last layout the job's bucket is smaller than the largest boxes, a twentieth of a rank's share or so."""
    for result in results:
        if result["last"]:
            assert result["report"]["staging_bytes"] <= 2 * result["bucket_bytes"]
            assert 0 < result["report"]["lent_bytes"] <= 2 * result["bucket_bytes"]
            assert result["report"]["received_bytes"] > 4 * result["bucket_bytes"]
            assert result["split_boxes"] > 0, result["rank"]
