"""Router replay with both engines: vLLM's choices of experts are replayed in Megatron, in every layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import make_checkpoint
from commands import EXPERTS, experts_folder, hybrid3d, read_rows
from hybrid3d.generation.samples import Sample
from run_ranks import ROOT, run_ranks

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

Found = dict[str, Any]
ALONE: Found = {"dp": 2}  # every rank has the whole model
TWO_RANKS = {"alone": ALONE, "tp": {"tp": 2, "packed": True, "recompute": "full"}}
FOUR_RANKS = {
    "alone": {"dp": 4, "micro_batch_size": 1},
    "ep": {"dp": 4, "ep": 4, "packed": True, "max_tokens_per_micro_batch": 256},
    "tp-pp": {"tp": 2, "pp": 2, "ep": 2, "recompute": "full", "micro_batch_size": 4},
    "vpp": {"pp": 2, "vpp": 2, "dp": 2, "recompute": "full", "packed": True},
    "tp": {"tp": 4, "ep": 2, "etp": 2, "max_tokens_per_micro_batch": 512},
}
# The wider the weights, the more a change of the experts' weights, which remains, is amplified by the layers above
CALMER = {"qwen3_moe": {"initializer_range": 0.07}}
# How many times p99 falls at least with noise of 1 %; DeepSeek-V2's weights of experts depend on all routers' scores
FALLS = {"deepseek_v2": 5}


def measured(
    folder: Path, family: str, layouts: dict[str, Found], ranks: int, rollout_tp: int, dtype: str = "float32"
) -> list[Found]:
    """What each rank has measured: see the job."""
    model = make_checkpoint(folder / "model", family, seed=1, **CALMER.get(family, {}))
    spec = {"folder": str(model), "dtype": dtype, "rollout_tp": rollout_tp, "noise": 1e-2, "layouts": layouts}
    (folder / "spec.json").write_text(json.dumps(spec))
    run_ranks(ROOT / "tests/jobs/router_replay.py", ranks, [str(folder / "spec.json"), str(folder)], timeout=500)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(ranks)]


def in_order(ranks: list[Found], layout: str, key: str) -> list[torch.Tensor]:
    """What the reporting ranks of a layout have of each data-parallel share, in the order of the samples."""
    shares = {rank[layout]["dp"]: rank[layout][key] for rank in ranks if rank[layout]["reports"]}
    return [shares[dp] for dp in sorted(shares)]


def p99(ranks: list[Found], layout: str, key: str) -> float:
    return float(torch.cat(in_order(ranks, layout, key)).double().quantile(0.99))


def recorded(ranks: list[Found], layout: str) -> list[torch.Tensor]:
    """What Megatron's routers chose by themselves, [tokens, layers, k] of each sample; each rank has some layers."""
    found: list[torch.Tensor] = []
    for dp in range(1 + max(rank[layout]["dp"] for rank in ranks)):
        shares = [rank[layout]["recorded"] for rank in ranks if rank[layout]["dp"] == dp]
        found += torch.stack(shares).amax(0)
    return found


def check_choices(samples: list[Sample], experts: int) -> None:
    """VLLM has returned choices for all tokens but the last of each sample, those in its cache included."""
    for sample in samples:
        assert len(sample.experts) == len(sample.prompt_ids) + len(sample.tokens) - 1
        assert sample.experts.array.shape[1:] in ((3, 2), (4, 2))  # where a layer is dense, it has none
        assert sample.experts.array.max() < experts
        assert (sample.experts.array[..., 0] != sample.experts.array[..., 1]).all()
    assert len({expert for s in samples for expert in s.experts.array.flatten().tolist()}) == experts


def check_layout(ranks: list[Found], layout: str, samples: list[Sample]) -> None:
    metrics = ranks[0][layout]["metrics"]
    assert metrics["mismatch/missing_expert_choices"] == 0
    equal = [
        torch.from_numpy(sample.experts.array.astype("int16")).sort(-1).values
        == own[: len(sample.experts)].sort(-1).values
        for sample, own in zip(samples, recorded(ranks, layout), strict=True)
    ]
    agreement = torch.cat([one.flatten() for one in equal]).double().mean()
    assert agreement > 0.999  # in float32 a tie is rare
    assert metrics["mismatch/expert_agreement"] == pytest.approx(float(agreement), abs=1e-3)
    for kind in ("none", "rollout"):
        assert p99(ranks, layout, f"{kind} gaps") < 1e-4


def check_against_alone(ranks: list[Found], layout: str) -> None:
    """Choices that no router would make give the same log-probabilities and gradients in every layout."""
    alone, here = (torch.cat(in_order(ranks, name, "scrambled")) for name in ("alone", layout))
    assert (alone - here).abs().max() < 1e-4
    assert (torch.cat(in_order(ranks, layout, "own")) - here).abs().mean() > 0.1
    norms = {name: ranks[0][name]["trained"]["grad_norm"] for name in ("alone", layout)}
    assert norms[layout] == pytest.approx(norms["alone"], rel=1e-4)


def check_counts(ranks: list[Found], layout: str, samples: list[Sample]) -> None:
    """Routers' biases move by the counts of the replayed choices, of which there are as many as of tokens."""
    sparse = sorted({layer for rank in ranks for layer in rank[layout]["bias steps"]})
    for index, layer in enumerate(sparse):
        chosen = torch.cat([torch.from_numpy(s.experts.array[:, index].astype("int64")).flatten() for s in samples])
        counts = chosen.bincount(minlength=8).double()
        steps = [rank[layout]["bias steps"][layer] for rank in ranks if layer in rank[layout]["bias steps"]]
        for step in steps:
            assert torch.allclose(step.double(), 0.1 * (counts.mean() - counts).sign(), atol=1e-6)


def check_noise(ranks: list[Found], layout: str, falls: int) -> None:
    """Noise on training's routers changes choices; without their change the mismatch falls.

    What remains is the change of the weights of the same experts, in proportion to the noise.
    """
    for name, times in (("noise", 2), ("relative noise", falls)):
        agreement = ranks[0][layout][f"metrics with {name}"]["mismatch/expert_agreement"]
        without, replayed, old = (p99(ranks, layout, f"{kind} gaps with {name}") for kind in ("none", "rollout", "old"))
        print(f"{layout}, {name}: p99 {without:.4f}, with router replay {replayed:.4f}; {agreement:.1%} agree")
        assert 0.5 < agreement < 0.999
        assert without > 0.02  # rounding alone: less than 0.0001
        assert replayed < without / times
        assert old == pytest.approx(replayed)


def check_all(ranks: list[Found], layouts: dict[str, Found], falls: int) -> None:
    samples = ranks[0]["samples"]
    check_choices(samples, experts=8)
    for layout in layouts:
        check_layout(ranks, layout, samples)
        check_against_alone(ranks, layout)
        check_counts(ranks, layout, ranks[0]["scrambled"])
        check_noise(ranks, layout, falls)


@pytest.mark.parametrize("family", ["deepseek_v3", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
def test_choices_are_replayed_on_two_ranks(family: str, tmp_path: Path) -> None:
    ranks = measured(tmp_path, family, TWO_RANKS, ranks=2, rollout_tp=2)
    check_all(ranks, TWO_RANKS, FALLS.get(family, 10))
    if family == "deepseek_v3":  # blocks of the cache are small, so that requests run out of them
        assert all(rank["preempted"] for rank in ranks)
        assert all(rank["alone"]["bias steps"] for rank in ranks)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe", "mixtral", "deepseek_v2", "glm4_moe"])
def test_choices_are_replayed_in_every_layout(family: str, tmp_path: Path) -> None:
    ranks = measured(tmp_path, family, FOUR_RANKS, ranks=4, rollout_tp=2)
    check_all(ranks, FOUR_RANKS, FALLS.get(family, 10))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe"])
def test_router_replay_narrows_gaps_in_bfloat16_too(family: str, tmp_path: Path) -> None:
    ranks = measured(tmp_path, family, {"tp": {"tp": 2}}, ranks=2, rollout_tp=2, dtype="bfloat16")
    metrics = ranks[0]["tp"]["metrics"]
    without, replayed = p99(ranks, "tp", "none gaps"), p99(ranks, "tp", "rollout gaps")
    agreement = metrics["mismatch/expert_agreement"]
    print(f"{family}, bfloat16: p99 {without:.3f} without router replay, {replayed:.3f} with it; {agreement:.1%} agree")
    assert metrics["mismatch/missing_expert_choices"] == 0
    assert agreement > 0.95
    assert replayed < without


@pytest.mark.slow
@pytest.mark.parametrize("replay", ["old", "rollout"])
def test_run_with_router_replay_is_replayed_bit_for_bit(replay: str, demo: Path, tmp_path: Path) -> None:
    """Through the commands, with two updates a step, which are computed again from the record."""
    experts_folder(tmp_path, demo, "qwen3_moe")
    settings = [*EXPERTS, "run.steps=2", "algorithm.prompts_per_step=8", "algorithm.samples_per_prompt=4"]
    settings += ["algorithm.minibatches=2", "run.record=always", f"train.router_replay={replay}"]
    settings += ["train.tp=2", "train.pp=2", "rollout.tp=2", "train.packed=true", "model.dtype=bfloat16"]
    hybrid3d(tmp_path, "train", str(ROOT / "recipes/demo-cpu.yaml"), *settings)
    for row in read_rows(tmp_path / "runs/demo-cpu"):
        assert ("mismatch/expert_agreement" in row) == (replay == "rollout")
        if replay == "rollout":
            assert row["mismatch/missing_expert_choices"] == 0
            assert 0.5 < row["mismatch/expert_agreement"] < 1
    hybrid3d(tmp_path, "replay", "runs/demo-cpu", "--step", "1")
    report = json.loads((tmp_path / "runs/demo-cpu/replay/step-000001.json").read_text())
    assert report["equal"], report["first_difference"]
