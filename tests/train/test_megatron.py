"""Megatron, driven by hybrid3d, against transformers and plain PyTorch: every family in every layout, in one launch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import DENSE, FAMILIES, LATENT, LLAMA3_ROPE, ORIGINAL_POSITIONS, SIZES, SPARSE, VOCABULARY, model_of
from reference import (
    ADAM,
    SFT,
    logits_of,
    make_inputs,
    pick,
    save_near,
    tensors_in,
    true_logits,
    true_step,
)
from run_ranks import run_ranks

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1000), pytest.mark.usefixtures("one_thread")]

LAYOUTS: dict[str, dict[str, int]] = {
    "tp1-pp1": dict(dp=4),
    "tp2-pp1": dict(tp=2, dp=2),
    "tp4-pp1": dict(tp=4),  # two query groups on four ranks, and 330 tokens padded to 332
    "tp1-pp2": dict(pp=2, dp=2),
    "tp2-pp2": dict(tp=2, pp=2),
    "tp2-pp2-vpp2": dict(tp=2, pp=2, vpp=2),
    "ep2": dict(dp=4, ep=2),
    "tp2-ep2": dict(tp=2, dp=2, ep=2),
    "tp2-ep2-etp2": dict(tp=2, dp=2, ep=2, etp=2),
    "tp2-pp2-ep2": dict(tp=2, pp=2, ep=2, last_stage_layers=1),
    "pp2-vpp2-ep2": dict(pp=2, vpp=2, dp=2, ep=2),
    "dp4-ep2-etp2": dict(dp=4, ep=2, etp=2),  # experts are sharded where attention is not
    "dp4-ep4": dict(dp=4, ep=4),
    "pp2-first1": dict(pp=2, dp=2, first_stage_layers=1),  # of DeepSeek the first stage has no experts
    "tp2-pp2-packed": dict(tp=2, pp=2, packed=True, max_tokens_per_micro_batch=71),
    "tp2-pp2-budget": dict(tp=2, pp=2, max_tokens_per_micro_batch=71),  # stages tell each other each shape
    # Left to themselves the ranks would make 3, 3, 2 and 3 micro batches, and experts would wait for the third.
    "dp4-ep2-packed": dict(dp=4, ep=2, packed=True, max_tokens_per_micro_batch=30),
    "pp2-vpp2-ep2-packed": dict(pp=2, vpp=2, dp=2, ep=2, packed=True, max_tokens_per_micro_batch=71, recompute="full"),
}
DENSE_LAYOUTS = ("tp1-pp1", "tp2-pp1", "tp4-pp1", "tp1-pp2", "tp2-pp2", "tp2-pp2-vpp2")
SPARSE_LAYOUTS = (
    *("tp1-pp1", "tp2-pp2", "ep2", "tp2-ep2", "tp2-ep2-etp2", "tp2-pp2-ep2", "pp2-vpp2-ep2"),
    *("dp4-ep2-etp2", "dp4-ep4", "pp2-first1"),
)
FEW_LAYOUTS = ("tp1-pp1", "tp2-ep2", "tp2-pp2-ep2")
CASES = {
    **dict.fromkeys(DENSE, DENSE_LAYOUTS),
    **dict.fromkeys(SPARSE, FEW_LAYOUTS),
    "qwen2": (*DENSE_LAYOUTS, "pp2-first1", "tp2-pp2-packed"),  # tied embeddings lie on both stages
    "qwen3_moe": (*SPARSE_LAYOUTS, "pp2-vpp2-ep2-packed", "dp4-ep2-packed"),
    "deepseek_v3": (*SPARSE_LAYOUTS, "tp2-pp2-packed", "tp2-pp2-budget"),
}
# Kinds of loss and sizes of micro batches: in one layout each kind in each size.
STEPS = {layout: [("sft", 4), ("grpo", 4)] for layout in LAYOUTS}
STEPS |= {layout: [("grpo", 4)] for layout in LAYOUTS if "max_tokens_per_micro_batch" in LAYOUTS[layout]}
STEPS["tp2-pp2"] = [("sft", 2), ("sft", 4), ("grpo", 2), ("grpo", 4)]
STEPS["tp2-pp2-vpp2"] = [("sft", 2), ("grpo", 4)]
RESUMED = ("qwen2", "deepseek_v3")  # tied embeddings lie on two pipeline stages; experts on two ranks
# Where a checkpoint of TP2 x PP2 is loaded too; of DeepSeek at PP4 the first stage has no experts
ELSEWHERE: dict[str, dict[str, int]] = {"pp2-dp2": dict(pp=2, dp=2), "pp4": dict(pp=4), "tp4": dict(tp=4)}

# In make test; the other layouts of these families in make test-all
QUICK = {"llama": ("tp2-pp2",), "qwen3": ("tp1-pp1", "tp2-pp2")}
QUICK |= dict.fromkeys(("mixtral", "deepseek_v2"), ("tp2-ep2",))
QUICK["qwen2"] = ("tp2-pp1", "tp2-pp2", "tp2-pp2-vpp2", "pp2-first1", "tp2-pp2-packed")
QUICK["qwen3_moe"] = ("tp2-ep2-etp2", "tp2-ep2", "pp2-vpp2-ep2", "dp4-ep4", "pp2-vpp2-ep2-packed")
QUICK["deepseek_v3"] = ("tp2-ep2", "tp2-pp2-ep2", "dp4-ep2-etp2", "tp2-pp2-budget")


def plain_layout(family: str) -> str:
    """Return the layout of the tests that need one only."""
    return "tp2-ep2" if family in SPARSE else "tp2-pp2"


def case(family: str, layout: str, *more: Any) -> Any:
    marks = [] if layout in QUICK.get(family, CASES[family]) else [pytest.mark.slow]
    return pytest.param(family, layout, *more, marks=marks)


every_case = pytest.mark.parametrize(("family", "layout"), [case(f, name) for f in FAMILIES for name in CASES[f]])
every_resumed = pytest.mark.parametrize("family", RESUMED)


class Results:
    """What the ranks wrote down."""

    def __init__(self, checkpoints: dict[str, dict[str, str]], folder: Path):
        self.checkpoints, self.folder = checkpoints, folder

    def source(self, family: str) -> str:
        return self.checkpoints[family]["start"]

    def of(self, family: str, layout: str, what: str) -> list[Any]:
        """By rank."""
        return [torch.load(self.folder / f"{family}-{layout}-rank{rank}.pt")[what] for rank in range(4)]

    def exported(self, family: str, layout: str, what: str) -> Path:
        return self.folder / f"{family}-{layout}" / what

    def logits(self, family: str, layout: str) -> list[torch.Tensor]:
        """Of each data-parallel replica, [2, 200, vocabulary as Megatron pads it]."""
        shards = [r for r in self.of(family, layout, "forward") if r["logits"] is not None]
        by_tp = sorted(shards, key=lambda shard: shard["tp"])
        replicas = sorted({shard["dp"] for shard in shards})
        return [torch.cat([s["logits"] for s in by_tp if s["dp"] == replica], dim=-1) for replica in replicas]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint) -> Results:
    """Of the families and layouts whose tests were selected."""
    out, checkpoints = tmp_path_factory.mktemp("megatron"), {}
    selected: dict[str, set[str]] = {}
    for item in request.session.items:
        if item.module is request.module:
            family = item.callspec.params["family"]
            selected.setdefault(family, {plain_layout(family)}).add(item.callspec.params.get("layout", ""))
    for family in (family for family in FAMILIES if family in selected):
        start, other, near = tiny_checkpoint(family, 1), tiny_checkpoint(family, 2), out / f"{family}-near"
        save_near(start, near)
        checkpoints[family] = {"start": str(start), "other": str(other), "near": str(near)}
    cases = {family: [layout for layout in CASES[family] if layout in selected[family]] for family in checkpoints}
    resumed = [family for family in RESUMED if family in checkpoints]
    work = {"checkpoints": checkpoints, "layouts": LAYOUTS, "cases": cases, "steps": STEPS}
    work |= {"resumed": resumed, "elsewhere": ELSEWHERE}
    torch.save(make_inputs() | work, out / "inputs.pt")
    job = Path(__file__).parents[1] / "jobs" / "train_layouts.py"
    run_ranks(job, 4, [str(out / "inputs.pt"), str(out)], timeout=900)
    return Results(checkpoints, out)


@every_case
def test_logits_equal_transformers(results: Results, family: str, layout: str) -> None:
    tp, dp = (LAYOUTS[layout].get(axis, 1) for axis in ("tp", "dp"))
    replicas, true = results.logits(family, layout), true_logits(results.source(family))
    assert len(replicas) == dp
    assert true.shape == (2, 200, VOCABULARY)
    assert true.shape[1] > ORIGINAL_POSITIONS
    for logits in replicas:
        assert logits.shape[-1] == (332 if tp == 4 else VOCABULARY)
        assert (logits[..., :VOCABULARY] - true).abs().max() <= 1e-4
        if layout == "tp1-pp1" and family in DENSE:
            assert torch.equal(logits, true)


def no_rope(model: torch.nn.Module) -> None:
    model.model.rotary_emb.inv_freq.zero_()


def rope_of(model: torch.nn.Module, parameters: dict[str, Any]) -> None:
    from transformers import LlamaConfig

    config = LlamaConfig(**SIZES, rope_parameters=parameters)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)


def no_scaling(model: torch.nn.Module) -> None:
    rope_of(model, {"rope_type": "default", "rope_theta": LLAMA3_ROPE["rope_theta"]})


def scaling_of_llama_3_1(model: torch.nn.Module) -> None:
    """What Megatron's GPTModel applies by itself, whatever the checkpoint's config says."""
    theirs = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    rope_of(model, LLAMA3_ROPE | theirs)


def whole_heads_rotated(model: torch.nn.Module) -> None:
    model.config.rope_parameters["partial_rotary_factor"] = 1.0
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)


def fresh(model: torch.nn.Module, names: str) -> None:
    """Parameters whose name ends so become what a new model has."""
    changed = [parameter for name, parameter in model.named_parameters() if name.endswith(names)]
    assert changed
    for parameter in changed:
        parameter.data.fill_(0.0 if names.endswith("bias") else 1.0)


def no_qk_norm(model: torch.nn.Module) -> None:
    for layer in model.model.layers:
        layer.self_attn.q_norm = layer.self_attn.k_norm = torch.nn.Identity()


def no_attention(model: torch.nn.Module) -> None:
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()


def without_in_experts(part: str) -> Callable[[torch.nn.Module], None]:
    """A change that puts zeros in a part of every sparse layer's MLP."""

    def change(model: torch.nn.Module) -> None:
        blocks = [layer.mlp for layer in model.model.layers if hasattr(layer.mlp, "experts")]
        assert blocks
        for block in blocks:
            functools.reduce(getattr, part.split("."), block).data.zero_()

    change.__name__ = f"no_{part}"
    return change


CHANGES: dict[str, list[Any]] = {
    **{family: [no_rope, no_attention, "layernorm.weight", "model.norm.weight"] for family in FAMILIES},
}
for family in SPARSE:
    CHANGES[family] += [without_in_experts("gate.weight"), without_in_experts("experts.down_proj")]
for family in LATENT:
    CHANGES[family] += ["kv_a_layernorm.weight", without_in_experts("shared_experts.down_proj.weight")]
for family in ("deepseek_v3", "kimi_k2", "moonlight", "glm4_moe"):
    CHANGES[family] += [without_in_experts("gate.e_score_correction_bias")]
for family in ("qwen3", "qwen3_moe", "glm4_moe"):
    CHANGES[family] += [no_qk_norm, "q_norm.weight", "k_norm.weight"]
CHANGES["llama"] += [no_scaling, scaling_of_llama_3_1]
for family in ("qwen2", "glm4_moe"):
    CHANGES[family] += [f"{x}_proj.bias" for x in "qkv"]
CHANGES["glm4_moe"] += [whole_heads_rotated, without_in_experts("shared_experts.down_proj.weight")]
for family in ("deepseek_v3", "kimi_k2"):
    CHANGES[family] += ["q_a_layernorm.weight"]


@pytest.mark.parametrize(("family", "change"), [(f, change) for f, changes in CHANGES.items() for change in changes])
def test_logits_would_show_a_part_left_out(results: Results, family: str, change) -> None:
    model = model_of(results.source(family))
    fresh(model, change) if isinstance(change, str) else change(model)
    logits = results.logits(family, plain_layout(family))[0]
    assert (logits - logits_of(model)).abs().max() > 1e-2


@every_case
def test_logprobs_are_of_the_distribution_that_is_sampled_from(results: Results, family: str, layout: str) -> None:
    true = pick(true_logits(results.source(family)), torch.tensor(make_inputs()["long"]))
    spoken = [rank["logprobs"] for rank in results.of(family, layout, "forward") if rank["logprobs"] is not None]
    assert len(spoken) == 4 // LAYOUTS[layout].get("pp", 1)
    for logprobs in spoken:
        assert torch.equal(logprobs[:, 0], torch.zeros(2))
        assert (logprobs - true).abs().max() <= 1e-4


@pytest.mark.parametrize(
    ("family", "layout", "kind", "micro_batch"),
    [case(family, layout, *step) for family in FAMILIES for layout in CASES[family] for step in STEPS[layout]],
)
def test_step_equals_plain_pytorch(results: Results, family: str, layout: str, kind: str, micro_batch: int) -> None:
    source = results.source(family)
    means, norm, weights = true_step(source, results.checkpoints[family]["near"], kind)
    reports, inputs = results.of(family, layout, f"{kind}-{micro_batch}"), make_inputs()
    tokens = sum(len(row) - prompt for row, prompt in zip(inputs["sequences"], inputs["prompts"], strict=True))
    assert sum(report["is_reporting_rank"] for report in reports) == LAYOUTS[layout].get("dp", 1)
    for key, mean in means.items():
        total = sum(report["sums"][key] for report in reports if report["is_reporting_rank"])
        assert total / tokens == pytest.approx(mean, rel=1e-5), key
    for report in reports:
        assert report["grad_norm"] == pytest.approx(norm, rel=1e-5)
        assert report["lr"] == ADAM["lr"]
    if kind == "sft":
        assert norm > SFT["clip_grad"]
    else:
        assert 0.05 < means["clip_fraction"] < 0.5
        assert means["kl"] > 0.001
    before, after = tensors_in(source), tensors_in(results.exported(family, layout, f"{kind}-{micro_batch}"))
    assert after.keys() == before.keys()
    for name, tensor in after.items():
        assert (tensor - weights[name]).abs().max() <= 1e-5, name
        if not torch.equal(weights[name], before[name]):  # an expert that got no token stays
            assert (tensor - before[name]).abs().max() > 5e-5, name
    stayed = [name for name in weights if torch.equal(weights[name], before[name])]
    assert len(stayed) < len(weights) / 5


@every_case
def test_export_gives_back_what_was_loaded(results: Results, family: str, layout: str) -> None:
    folder, before = results.exported(family, layout, "loaded"), tensors_in(results.source(family))
    after = tensors_in(folder)
    assert len(list(folder.glob("*.safetensors"))) > 3
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert torch.equal(logits_of(model_of(folder)), true_logits(results.source(family)))


@every_resumed
def test_resumed_run_repeats_what_would_have_come(results: Results, family: str) -> None:
    went_on, resumed = (results.of(family, "resume", what) for what in ("went on", "resumed"))
    assert resumed == went_on  # losses, gradient norms and learning rates, to the last bit
    assert went_on[0][0]["lr"] != went_on[0][1]["lr"]
    expected, found = (tensors_in(results.exported(family, "resume", what)) for what in ("went-on", "resumed"))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@every_resumed
@pytest.mark.parametrize("layout", ELSEWHERE)
def test_checkpoint_loads_into_another_layout(results: Results, family: str, layout: str) -> None:
    """Weights to the last bit; and the optimizer's state, by what two further updates come to."""
    kinds = "saved", f"loaded-{layout}", "went-on", f"resumed-{layout}"
    saved, loaded, went_on, resumed = (tensors_in(results.exported(family, "resume", kind)) for kind in kinds)
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)
    assert all((resumed[name] - went_on[name]).abs().max() <= 1e-5 for name in saved)
    assert any((went_on[name] - saved[name]).abs().max() > 5e-5 for name in saved)

    def said(what: str) -> list[float]:
        ranks = results.of(family, "resume", what)
        losses = [
            sum(rank[step]["sums"]["loss"] for rank in ranks if rank[step]["is_reporting_rank"]) for step in range(2)
        ]
        return losses + [ranks[0][step][key] for step in range(2) for key in ("grad_norm", "lr")]

    assert said(f"resumed {layout}") == pytest.approx(said("went on"), rel=1e-5)
