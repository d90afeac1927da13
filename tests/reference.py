"""What transformers and plain PyTorch compute for the job of test_megatron.py, the formulas written out once more."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.nn.functional import pad

from checkpoints import VOCABULARY, model_of

TEMPERATURE, CLIP, KL_COEF = 0.7, 0.2, 0.1
# A large eps makes Adam's first step depend on the size of the gradient, and not on its sign alone.
ADAM = dict(lr=1e-2, eps=1e-2)
BIAS_RATE = 0.01
SFT, GRPO = dict(clip_grad=0.5), dict(clip_grad=0.0, weight_decay=0.1)


@cache
def make_inputs() -> dict[str, Any]:
    """Two long sequences, and the global batch of a step: 16 ragged sequences with all that GRPO wants of them."""
    random = torch.Generator().manual_seed(5)

    def tokens(count: int) -> list[int]:
        return torch.randint(3, VOCABULARY, (count,), generator=random).tolist()

    lengths = torch.randint(6, 25, (16,), generator=random).tolist()
    return dict(
        temperature=TEMPERATURE,
        clip=CLIP,
        kl_coef=KL_COEF,
        expert_bias_update_rate=BIAS_RATE,
        optimizer=ADAM,
        sft=SFT,
        grpo=GRPO,
        long=[tokens(200) for _ in range(2)],
        sequences=[tokens(length) for length in lengths],
        prompts=[1 + row % 5 for row in range(16)],
        advantages=torch.randn(16, generator=random),
        noise=torch.randn(16, 25, generator=random) * 0.3,  # how far the policy has moved since it sampled
        returns=torch.randn(16, 25, generator=random),
    )


def tensors_in(folder: str | Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    files = sorted(Path(folder).glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def save_near(folder: str | Path, out: Path) -> None:
    """A reference policy from which the model has moved a little, as in a run: by a KL below 1.

    At 0.01 instead of 0.003 the KL of Moonlight is 8.5, and float32 rounds its gradient norm by 2e-5 of it.
    """
    model, random = model_of(folder), torch.Generator().manual_seed(9)
    for _, parameter in sorted(model.named_parameters()):
        parameter.data += torch.randn(parameter.shape, generator=random) * 0.003
    model.save_pretrained(out)


@torch.no_grad()
def logits_of(model: torch.nn.Module) -> torch.Tensor:
    """[2, 200, vocabulary] of the long sequences, one at a time, as the ranks compute them."""
    return torch.cat([model(torch.tensor([row])).logits for row in make_inputs()["long"]])


@cache
def true_logits(folder: str) -> torch.Tensor:
    return logits_of(model_of(folder))


def pick(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """[B, T]: the log-probability of each token given those before it, 0 at the first."""
    log_p = (logits / TEMPERATURE).log_softmax(-1)
    return pad(log_p[:, :-1].gather(-1, tokens[:, 1:, None]).squeeze(-1), (1, 0))


@cache
def true_step(folder: str, reference: str, kind: str) -> tuple[dict[str, float], float, dict[str, torch.Tensor]]:
    """One step of plain PyTorch on the global batch: means over its tokens, gradient norm, weights afterwards."""
    inputs, model = make_inputs(), model_of(folder)
    tokens, at, lengths, mask = _laid_out(inputs)
    width = tokens.shape[1]
    counts = _count_routed(model, at < lengths)
    new, means = pick(model(tokens).logits, tokens), {}
    if kind == "sft":
        losses = -new
    else:
        with torch.no_grad():
            old = new.detach() + inputs["noise"][:, :width]
            ref = pick(model_of(reference)(tokens).logits, tokens)
        ratio, advantages = (new - old).exp(), inputs["advantages"][:, None]
        surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
        kl = (ref - new).exp() - (ref - new) - 1
        losses = -surrogate + KL_COEF * kl
        clipped = (advantages > 0) & (ratio > 1 + CLIP) | (advantages < 0) & (ratio < 1 - CLIP)
        means = {"ratio": ratio[mask].mean(), "kl": kl[mask].mean(), "clip_fraction": clipped[mask].float().mean()}
    means["loss"] = losses[mask].mean()
    means["loss"].backward()
    norm, weights = _adam(model, SFT if kind == "sft" else GRPO)
    for name, count in counts.items():  # arXiv 2408.15664, algorithm 1
        weights[name] += BIAS_RATE * (count.mean() - count).sign()
    return {key: value.item() for key, value in means.items()}, norm, weights


def classifier_of(folder: str | Path) -> torch.nn.Module:
    """A sequence classifier of one label; its head is random where the folder has none."""
    from transformers import AutoModelForSequenceClassification

    return AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32, num_labels=1)


def save_classifier(folder: str | Path, out: Path) -> None:
    """The language model's layers under a head that says something."""
    model = classifier_of(folder)
    model.score.weight.data = torch.randn(model.score.weight.shape, generator=torch.Generator().manual_seed(3)) * 0.3
    model.save_pretrained(out)


def values_of(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """[B, T]: what the head makes of the hidden state before each token, 0 at the first."""
    return pad(model.score(model.model(tokens).last_hidden_state)[:, :-1, 0], (1, 0))


@torch.no_grad()
def true_scores(folder: str) -> torch.Tensor:
    """[16] of the global batch, which transformers reads at the last token that is no padding."""
    model = classifier_of(folder)
    return torch.cat([model(torch.tensor([row])).logits[:, 0] for row in make_inputs()["sequences"]])


def true_value_step(
    folder: str, steps: int, fresh: bool
) -> tuple[list[float], list[float], torch.Tensor, dict[str, torch.Tensor]]:
    """Steps of plain PyTorch on squared errors of values: mean losses, gradient norms, values and weights after them.

    Args:
        fresh: the head starts at zero.
    """
    inputs, model = make_inputs(), classifier_of(folder)
    if fresh:
        model.score.weight.data.zero_()
    tokens, at, lengths, mask = _laid_out(inputs)
    losses, norms, counts, optimizer = [], [], _count_routed(model, at < lengths), _optimizer(model, SFT)
    for _ in range(steps):
        errors = values_of(model, tokens) - inputs["returns"][:, : tokens.shape[1]]
        loss = errors[mask].square().mean() / 2
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), SFT["clip_grad"]).item())
        losses.append(loss.item())
        optimizer.step()
        for name, count in counts.items():
            model.get_buffer(name).add_(BIAS_RATE * (count.mean() - count).sign())
    with torch.no_grad():
        return losses, norms, values_of(model, tokens) * (at < lengths), saved(model)


def _laid_out(inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens of the global batch [16, T], positions [T], lengths [16, 1], and the mask of responses [16, T]."""
    sequences, prompts = inputs["sequences"], torch.tensor(inputs["prompts"])[:, None]
    width = max(map(len, sequences))
    tokens = torch.tensor([row + [0] * (width - len(row)) for row in sequences])
    at, lengths = torch.arange(width), torch.tensor([[len(row)] for row in sequences])
    return tokens, at, lengths, (at >= prompts) & (at < lengths)


def _count_routed(model: torch.nn.Module, real: torch.Tensor) -> dict[str, torch.Tensor]:
    """By name of each router's bias, how many real tokens go to each expert: filled in by the next forward pass."""
    counts: dict[str, torch.Tensor] = {}

    def count(name: str) -> Callable[..., None]:
        def hook(gate: torch.nn.Module, inputs: Any, routed: tuple[torch.Tensor, ...]) -> None:
            chosen = routed[2][real.flatten()]
            counts[name] = torch.bincount(chosen.flatten(), minlength=gate.num_experts).float()

        return hook

    for name, module in model.named_modules():
        if hasattr(module, "e_score_correction_bias"):
            module.register_forward_hook(count(f"{name}.e_score_correction_bias"))
    return counts


def _adam(model: torch.nn.Module, settings: dict[str, float]) -> tuple[float, dict[str, torch.Tensor]]:
    """Clip and step. Biases and norms do not decay."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings["clip_grad"] or float("inf"))
    _optimizer(model, settings).step()
    return norm.item(), saved(model)


def _optimizer(model: torch.nn.Module, settings: dict[str, float]) -> torch.optim.Optimizer:
    decay = settings.get("weight_decay", 0.0)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": decay},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, **ADAM)


def saved(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    with TemporaryDirectory() as folder:  # in memory transformers stacks experts
        model.save_pretrained(folder)
        return tensors_in(folder)
