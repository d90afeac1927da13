"""Megatron, driven by hybrid3d, against transformers and plain PyTorch: every family in every layout, in one launch."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import pad

from checkpoints import FAMILIES, LLAMA3_ROPE, ORIGINAL_POSITIONS, VOCABULARY
from run_ranks import run_ranks

pytestmark = pytest.mark.engines

LAYOUTS: dict[str, dict[str, int]] = {
    "tp1-pp1": dict(dp=4),
    "tp2-pp1": dict(tp=2, dp=2),
    "tp4-pp1": dict(tp=4),  # two query groups on four ranks, and 330 tokens padded to 332
    "tp1-pp2": dict(pp=2, dp=2),
    "tp2-pp2": dict(tp=2, pp=2),
    "tp2-pp2-vpp2": dict(tp=2, pp=2, vpp=2),
}
MICRO_BATCHES = (2, 4)
TEMPERATURE, CLIP, KL_COEF = 0.7, 0.2, 0.1
# A large eps makes Adam's first step depend on the size of the gradient, and not on its sign alone.
ADAM = dict(lr=1e-2, eps=1e-3)
SFT, GRPO = dict(clip_grad=0.5), dict(clip_grad=0.0, weight_decay=0.1)
RESUMED = ("qwen2", "qwen3")  # tied embeddings and untied

every_family = pytest.mark.parametrize("family", FAMILIES)
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


def random_tokens(count: int, generator: torch.Generator) -> list[int]:
    return torch.randint(3, VOCABULARY, (count,), generator=generator).tolist()


def make_inputs() -> dict[str, Any]:
    random = torch.Generator().manual_seed(5)
    lengths = torch.randint(6, 25, (16,), generator=random).tolist()
    return dict(
        layouts=LAYOUTS,
        micro_batch_sizes=MICRO_BATCHES,
        temperature=TEMPERATURE,
        clip=CLIP,
        kl_coef=KL_COEF,
        optimizer=ADAM,
        sft=SFT,
        grpo=GRPO,
        resumed=RESUMED,
        long=[random_tokens(200, random) for _ in range(2)],
        sequences=[random_tokens(length, random) for length in lengths],
        prompts=[1 + row % 5 for row in range(16)],
        advantages=torch.randn(16, generator=random),
        noise=torch.randn(16, 25, generator=random) * 0.3,
    )


class Results:
    """What the ranks wrote down."""

    def __init__(self, inputs: dict[str, Any], folder: Path):
        self.inputs, self.folder = inputs, folder

    def of(self, family: str, layout: str, what: str) -> list[dict[str, Any]]:
        """By rank."""
        return [torch.load(self.folder / f"{family}-{layout}-rank{rank}.pt")[what] for rank in range(4)]

    def exported(self, family: str, layout: str, what: str) -> dict[str, torch.Tensor]:
        return tensors_in(self.folder / f"{family}-{layout}" / what)

    def source(self, family: str, which: str = "start") -> str:
        return self.inputs["checkpoints"][family][which]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint) -> Results:
    out = tmp_path_factory.mktemp("megatron")
    folders = {}
    for family in FAMILIES:
        start, other = tiny_checkpoint(family, 1), tiny_checkpoint(family, 2)
        folders[family] = {"start": str(start), "other": str(other), "near": str(out / f"{family}-near")}
        save_near(model_of(start), out / f"{family}-near")
    inputs = make_inputs() | {"checkpoints": folders}
    torch.save(inputs, out / "inputs.pt")
    job = Path(__file__).parent / "jobs" / "train_layouts.py"
    run_ranks(job, 4, [str(out / "inputs.pt"), str(out)], timeout=400)
    return Results(inputs, out)


def save_near(model: torch.nn.Module, folder: Path) -> None:
    """A reference policy from which the model has moved a little, as in a run."""
    random = torch.Generator().manual_seed(9)
    for _, parameter in sorted(model.named_parameters()):
        parameter.data += torch.randn(parameter.shape, generator=random) * 0.01
    model.save_pretrained(folder)


@pytest.fixture(autouse=True)
def one_thread():
    """Matrix products add up in one order only if as many threads share them as a rank has."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def tensors_in(folder: str | Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    files = sorted(Path(folder).glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def model_of(folder: str | Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@cache
def true_logits(folder: str) -> torch.Tensor:
    """[2, 200, vocabulary], a sequence at a time, as the ranks compute them."""
    with torch.no_grad():
        return torch.cat([model_of(folder)(torch.tensor([row])).logits for row in make_inputs()["long"]])


def logits_of(results: Results, family: str, layout: str) -> list[torch.Tensor]:
    """Of each data-parallel replica, [2, 200, vocabulary padded by Megatron]."""
    shards = [r for r in results.of(family, layout, "forward") if r["logits"] is not None]
    replicas = sorted({shard["dp"] for shard in shards})
    by_tp = sorted(shards, key=lambda shard: shard["tp"])
    return [torch.cat([s["logits"] for s in by_tp if s["dp"] == replica], dim=-1) for replica in replicas]


@every_layout
@every_family
def test_logits_equal_transformers(results: Results, family: str, layout: str) -> None:
    tp, dp = (LAYOUTS[layout].get(axis, 1) for axis in ("tp", "dp"))
    replicas, true = logits_of(results, family, layout), true_logits(results.source(family))
    assert len(replicas) == dp
    assert true.shape == (2, 200, VOCABULARY)
    assert true.shape[1] > ORIGINAL_POSITIONS
    for logits in replicas:
        assert logits.shape[-1] == (332 if tp == 4 else VOCABULARY)
        assert (logits[..., :VOCABULARY] - true).abs().max() <= 1e-4
        if layout == "tp1-pp1":
            assert torch.equal(logits, true)


def without_rope(model: torch.nn.Module) -> None:
    model.model.rotary_emb.inv_freq.zero_()


def without_scaling(model: torch.nn.Module) -> None:
    dims = model.config.head_dim
    model.model.rotary_emb.inv_freq = LLAMA3_ROPE["rope_theta"] ** (-torch.arange(0, dims, 2).float() / dims)


def with_scaling_of_llama_3_1(model: torch.nn.Module) -> None:
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    without_scaling(model)
    rotary = model.model.rotary_emb
    rotary.inv_freq = RotaryEmbedding._apply_scaling(None, rotary.inv_freq, factor=8.0)


def without_qk_norm(model: torch.nn.Module) -> None:
    for layer in model.model.layers:
        layer.self_attn.q_norm = layer.self_attn.k_norm = torch.nn.Identity()


def without(names: str):
    """Every parameter whose name ends so becomes what a fresh model has."""

    def change(model: torch.nn.Module) -> None:
        changed = [p for name, p in model.named_parameters() if name.endswith(names)]
        assert changed
        for parameter in changed:
            parameter.fill_(0.0 if names.endswith("bias") else 1.0)

    return change


@pytest.mark.parametrize(
    ("family", "change"),
    [
        *[(family, change) for family in FAMILIES for change in (without_rope, without("layernorm.weight"))],
        ("llama", without_scaling),
        ("llama", with_scaling_of_llama_3_1),
        ("qwen3", without_qk_norm),
        ("qwen3", without("q_norm.weight")),
        ("qwen3", without("k_norm.weight")),
        *[("qwen2", without(f"{x}_proj.bias")) for x in "qkv"],
    ],
)
@torch.no_grad()
def test_logits_would_show_a_part_left_out(results: Results, family: str, change) -> None:
    model = model_of(results.source(family))
    change(model)
    changed = torch.cat([model(torch.tensor([row])).logits for row in results.inputs["long"]])
    (logits,) = logits_of(results, family, "tp2-pp2")
    assert (logits - changed).abs().max() > 1e-2


@every_layout
@every_family
def test_logprobs_are_of_the_distribution_that_is_sampled_from(results: Results, family: str, layout: str) -> None:
    tokens = torch.tensor(results.inputs["long"])
    logits = true_logits(results.source(family)) / TEMPERATURE
    true = logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
    spoken = [rank["logprobs"] for rank in results.of(family, layout, "forward") if rank["logprobs"] is not None]
    assert len(spoken) == 4 // LAYOUTS[layout].get("pp", 1)
    for logprobs in spoken:
        assert torch.equal(logprobs[:, 0], torch.zeros(2))
        assert (logprobs[:, 1:] - true).abs().max() <= 1e-4


@cache
def true_step(folder: str, reference: str, kind: str) -> tuple[dict[str, float], float, dict[str, torch.Tensor]]:
    """One step of plain PyTorch on the global batch: means over its tokens, gradient norm, weights afterwards."""
    inputs, model = make_inputs(), model_of(folder)
    sequences, prompts = inputs["sequences"], torch.tensor(inputs["prompts"])[:, None]
    width = max(map(len, sequences))
    tokens = torch.tensor([row + [0] * (width - len(row)) for row in sequences])
    at, lengths = torch.arange(width), torch.tensor([[len(row)] for row in sequences])
    mask = (at >= prompts) & (at < lengths)

    def logprobs(model: torch.nn.Module) -> torch.Tensor:
        log_p = (model(tokens).logits / TEMPERATURE).log_softmax(-1)
        return pad(log_p[:, :-1].gather(-1, tokens[:, 1:, None]).squeeze(-1), (1, 0))

    new, means = logprobs(model), {}
    if kind == "sft":
        losses = -new
    else:
        with torch.no_grad():
            old, ref = new.detach() + inputs["noise"][:, :width], logprobs(model_of(reference))
        ratio, advantages = (new - old).exp(), inputs["advantages"][:, None]
        surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
        kl = (ref - new).exp() - (ref - new) - 1
        losses = -surrogate + KL_COEF * kl
        clipped = (advantages > 0) & (ratio > 1 + CLIP) | (advantages < 0) & (ratio < 1 - CLIP)
        means = {"ratio": ratio[mask].mean(), "kl": kl[mask].mean(), "clip_fraction": clipped[mask].float().mean()}
    loss = losses[mask].mean()
    loss.backward()
    settings = SFT if kind == "sft" else GRPO
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings["clip_grad"] or float("inf"))
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]  # biases and norms do not decay
    groups = [{"params": matrices, "weight_decay": settings.get("weight_decay", 0.0)}, {"params": vectors}]
    torch.optim.AdamW(groups, **ADAM, weight_decay=0.0).step()
    means = {key: value.item() for key, value in {**means, "loss": loss}.items()}
    return means, float(norm), {name: tensor.detach() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("micro_batch", MICRO_BATCHES)
@pytest.mark.parametrize("kind", ["sft", "grpo"])
@every_layout
@every_family
def test_a_step_equals_plain_pytorch(results: Results, family: str, layout: str, kind: str, micro_batch: int) -> None:
    means, norm, weights = true_step(results.source(family), results.source(family, "near"), kind)
    reports = results.of(family, layout, f"{kind}-{micro_batch}")
    inputs = results.inputs
    tokens = sum(len(row) - prompt for row, prompt in zip(inputs["sequences"], inputs["prompts"], strict=True))
    assert sum(report["counts"] for report in reports) == LAYOUTS[layout].get("dp", 1)
    for key, mean in means.items():
        total = sum(report["sums"][key] for report in reports if report["counts"])
        assert total / tokens == pytest.approx(mean, rel=1e-5)
    for report in reports:
        assert report["grad_norm"] == pytest.approx(norm, rel=1e-5)
        assert report["lr"] == ADAM["lr"]
    if kind == "sft":
        assert norm > SFT["clip_grad"]
    else:
        assert 0.05 < means["clip_fraction"] < 0.5
    exported = results.exported(family, layout, f"{kind}-{micro_batch}")
    before = tensors_in(results.source(family))
    assert exported.keys() == before.keys()
    for name, tensor in exported.items():
        assert (tensor - weights[name]).abs().max() <= 1e-5, name
        assert (tensor - before[name]).abs().max() > 1e-4, name


@every_layout
@every_family
def test_export_gives_back_what_was_loaded(results: Results, family: str, layout: str) -> None:
    folder, before = results.folder / f"{family}-{layout}" / "loaded", tensors_in(results.source(family))
    after = tensors_in(folder)
    assert len(list(folder.glob("*.safetensors"))) > 3
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    with torch.no_grad():  # of the exported folder alone
        logits = torch.cat([model_of(folder)(torch.tensor([row])).logits for row in results.inputs["long"]])
    assert torch.equal(logits, true_logits(results.source(family)))


@pytest.mark.parametrize("family", RESUMED)
def test_a_resumed_run_repeats_what_would_have_come(results: Results, family: str) -> None:
    went_on, resumed = (results.of(family, "resume", what) for what in ("went on", "resumed"))
    assert resumed == went_on  # losses, gradient norms and learning rates, to the last bit
    assert went_on[0][0]["lr"] != went_on[0][1]["lr"]
    expected, found = (results.exported(family, "resume", what) for what in ("went-on", "resumed"))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("family", RESUMED)
def test_a_checkpoint_loads_into_another_layout(results: Results, family: str) -> None:
    saved, elsewhere = (results.exported(family, "resume", what) for what in ("saved", "elsewhere"))
    assert all(torch.equal(elsewhere[name], saved[name]) for name in saved)

    def losses(what: str) -> list[float]:
        ranks = results.of(family, "resume", what)
        return [sum(rank[step]["sums"]["loss"] for rank in ranks if rank[step]["counts"]) for step in range(2)]

    assert losses("resumed elsewhere") == pytest.approx(losses("went on"), rel=1e-5)
