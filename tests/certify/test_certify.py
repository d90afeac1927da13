"""`hybrid3d certify` accepts every family, and refuses faults of the field's issue trackers with the tensor's name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import FAMILIES
from commands import ROOT, hybrid3d
from hybrid3d import cli
from hybrid3d.certify.findings import CHECKS, Findings, describe_difference
from hybrid3d.certify.tiny_models import shrunk
from hybrid3d.config import read_recipe
from hybrid3d.families import family_of
from hybrid3d.generation.engine import Completion
from run_ranks import run_ranks

MODELS = sorted(path.parent for path in (ROOT / "recipes/models").glob("*/config.json"))
JOB = Path(__file__).parents[1] / "jobs" / "certify.py"

# Model, settings, and for each fault the check that must refuse it and what its message must name.
DENSE = ("qwen2", "train.tp=2 rollout.tp=2")
LATENT = ("deepseek_v3", "train.tp=2 train.ep=2 train.etp=1 rollout.tp=2")
SHARED = ("qwen3_moe", "train.dp=2 train.ep=2 rollout.tp=2 rollout.expert_parallel=true")
FAULTS: dict[tuple[str, str], dict[str, tuple[str, str]]] = {
    DENSE: {
        "tied_head_stale": ("weights", "lm_head.weight: "),
        "buffer_lost_in_sleep": ("weights", "self_attn.rotary_emb.cos_sin_cache: "),
        "bias_not_synced": ("weights", "self_attn.qkv_proj.bias: "),
        "padding_not_zeroed": ("weights", "model.embed_tokens.weight: "),
        "cache_kept": ("answers", "prompt 0 of 280 tokens: "),
        "old_scales": ("weights", "self_attn.attn._v_scale: "),
        "wrong_rope": ("weights", "self_attn.rotary_emb.cos_sin_cache: "),
        "megatron_rope": ("engines", "log-probabilities differ by "),
    },
    LATENT: {
        "processed_twice": ("weights", "mlp.experts.routed_experts.w2_weight: "),
        "derived_stale": ("weights", "W_UV: "),
        "experts_off_by_one": ("weights", "mlp.experts.routed_experts.w13_weight: "),
        "router_bias_not_synced": ("weights", "mlp.gate.e_score_correction_bias: "),
    },
    SHARED: {"expert_map_off_by_one": ("weights", "expert_map: ")},
}


@pytest.mark.slow
@pytest.mark.engines
@pytest.mark.processes
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", FAULTS, ids=[model for model, _ in FAULTS])
def test_certify_finds_and_names_every_fault(
    case: tuple[str, str], tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    model, settings = case
    faults = FAULTS[case]
    out = tmp_path / "out.json"
    run_ranks(
        JOB, 2, [str(out), str(tiny_checkpoint(model)), settings, "healthy", *faults, "healthy_again"], timeout=800
    )
    found = json.loads(out.read_text())
    assert wrong_of(found["healthy"]) == wrong_of(found["healthy_again"]) == {}
    for fault, (check, named) in faults.items():
        wrong = wrong_of(found[fault]).get(check, [])
        assert any(named in text for text in wrong), (fault, wrong_of(found[fault]))


def wrong_of(result: dict[str, Any]) -> dict[str, list[str]]:
    return {name: check["wrong"] for name, check in result["checks"].items() if check["wrong"]}


@pytest.mark.slow
@pytest.mark.engines
@pytest.mark.processes
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", FAMILIES)
def test_healthy_model_is_proven(family: str, tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    model = str(tiny_checkpoint(family))
    printed = hybrid3d(tmp_path, "certify", model, "train.tp=2", "rollout.tp=2", "--json", timeout=300)
    found = json.loads(printed)
    assert found["proven"] is True
    assert found["rounds"] == 10
    assert found["syncs_of_changes"] == 5
    assert list(found["checks"]) == list(CHECKS)
    assert all(check["compared"] > 0 for check in found["checks"].values())


def test_difference_names_the_element() -> None:
    expected = torch.arange(6.0).view(2, 3)
    found = expected.clone()
    assert describe_difference(found, expected) == ""
    found[1, 2] = 7
    assert describe_difference(found, expected) == "1 of 6 elements differ, at [1, 2] 7 instead of 5"
    assert describe_difference(expected.bfloat16(), expected) == "bfloat16 [2, 3] instead of float32 [2, 3]"
    assert describe_difference(torch.tensor(0.0), torch.tensor(-0.0)) == "1 of 1 elements differ, at [] 0 instead of -0"
    findings = Findings()
    findings.compare("weights", {"a": expected, "b": expected}, {"a": found, "c": expected})
    wrong = findings.checks["weights"].wrong
    assert [text.partition(":")[0] for text in wrong] == ["b", "c", "a"]


@pytest.mark.engines
def test_answer_that_begins_like_the_other_differs_in_length() -> None:
    from hybrid3d.certify.rounds import describe_answers

    live, fresh = Completion((5, 6, 7), (-0.5, -1.0, -1.5), 0), Completion((5, 6), (-0.5, -1.0), 0)
    assert describe_answers(live, fresh) == "the answer has 3 tokens instead of 2"
    assert describe_answers(fresh, live) == "the answer has 2 tokens instead of 3"
    other = Completion((5, 4), (-0.5, -0.25), 0)
    assert describe_answers(live, other) == "the answer's token 1 is token 6 at -1 instead of token 4 at -0.25"


@pytest.mark.engines
@pytest.mark.parametrize(("length", "answer"), [(288, 8), (24, 8), (9, 8), (2, 1)])
def test_prompts_leave_room_for_the_answer(length: int, answer: int) -> None:
    from hybrid3d.certify.rounds import prompts_of
    from hybrid3d.certify.task import raw_recipe

    model = str(ROOT / "recipes/models/qwen3-8b")
    raw = raw_recipe("certify", model, length)
    raw["rollout"]["max_new_tokens"] = answer
    requests = prompts_of(100, read_recipe(raw, "certify", []))
    assert len(requests) == 4
    for request in requests:
        assert request.max_new_tokens == answer
        assert 1 <= len(request.prompt_ids) <= length - answer
    assert max(len(request.prompt_ids) for request in requests) == length - answer


@pytest.mark.parametrize("model", MODELS, ids=[path.name for path in MODELS])
def test_tiny_model_has_layers_of_each_kind(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    small, family = shrunk(config, layers=2), family_of(config)
    kinds = family.representative_layers(config)
    assert set(family.representative_layers(small)) == set(kinds)
    assert family.rope(small) == family.rope(config)
    assert (family.latents(small) is None) == (family.latents(config) is None)
    assert small["num_hidden_layers"] <= 4
    assert small["hidden_size"] <= 2048


@pytest.mark.engines  # Megatron is imported to read the arguments
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere/config.json no such file"),
        (["MODEL", "--rounds", "0"], "--rounds 0: expected an integer from 1 to 1,000"),
        (["MODEL", "train.tp=x"], "train.tp: expected an integer"),
        (["MODEL", "roles.generation.ranks=1"], "each rank has both engines"),
    ],
)
def test_mistakes_are_refused_before_ranks_start(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    model = str(ROOT / "recipes/models/qwen3-8b")
    assert cli.main(["certify", *(model if word == "MODEL" else word for word in arguments)]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.iterdir())
