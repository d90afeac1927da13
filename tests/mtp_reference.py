"""Checkpoints with a layer for multi-token prediction, and what plain PyTorch computes with it.

`transformers` does not read such layers. Its decoder layer is the one within, and all around it is written out here
(arXiv 2412.19437, section 2.2).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy, linear

from checkpoints import make_checkpoint, skeleton_of
from reference import TEMPERATURE, make_inputs, saved, tensors_in

LAYERS = 4  # of the model
NORMS = ("enorm", "hnorm", "shared_head.norm")


def make_mtp_checkpoint(folder: Path, family: str, seed: int, **changes: Any) -> Path:
    """Write a checkpoint as it is published: the last layer that `transformers` makes becomes the one that predicts."""
    make_checkpoint(folder, family, seed, num_hidden_layers=LAYERS + 1, **changes)
    stored, random = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(seed)
    width, name = len(stored["model.norm.weight"]), f"model.layers.{LAYERS}."
    stored[f"{name}embed_tokens.weight"] = stored["model.embed_tokens.weight"].clone()
    stored[f"{name}shared_head.head.weight"] = stored["lm_head.weight"].clone()
    stored[f"{name}eh_proj.weight"] = torch.randn(width, 2 * width, generator=random) * 0.15
    for norm in NORMS:
        stored[f"{name}{norm}.weight"] = 1 + torch.randn(width, generator=random) * 0.1
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder


@dataclass(frozen=True)
class TrueStep:
    """Of `make_inputs`: the mean loss over answers' tokens, and by name of the layer's tensors their gradients.

    Attributes:
        routed: how many of the tokens go to each expert.
    """

    loss: float
    gradients: dict[str, torch.Tensor]
    routed: torch.Tensor

    @property
    def norm(self) -> float:
        return sum(float(gradient.double().square().sum()) for gradient in self.gradients.values()) ** 0.5


@cache
def true_mtp_step(folder: Path) -> TrueStep:
    """Compute the layer's loss one sequence at a time; position i predicts token i + 2, given token i + 1."""
    kind, config = skeleton_of(folder)
    config.num_hidden_layers = LAYERS + 1
    model = kind.from_pretrained(folder, config=config, dtype=torch.float32)
    name, stored = f"model.layers.{LAYERS}.", tensors_in(folder)
    own = {key: stored[f"{name}{key}.weight"].clone().requires_grad_() for key in (*NORMS, "eh_proj")}
    inputs, decoder, choices = make_inputs(), model.model.layers[LAYERS], []
    decoder.mlp.gate.register_forward_hook(lambda gate, given, routed: choices.append(routed[2].flatten()))
    model.requires_grad_(False)
    decoder.requires_grad_(True)
    total, count = torch.zeros(()), 0
    for row, prompt in zip(inputs["sequences"], inputs["prompts"], strict=True):
        tokens = torch.tensor([row])
        hidden = hidden_states(model, tokens)
        embedded = model.model.embed_tokens(torch.tensor([[*row[1:], 0]]))
        normed = [rms(embedded, own["enorm"], config.rms_norm_eps), rms(hidden, own["hnorm"], config.rms_norm_eps)]
        positions, state = torch.arange(len(row))[None], linear(torch.cat(normed, -1), own["eh_proj"])
        rotary = model.model.rotary_emb(hidden, positions)
        state = decoder(state, attention_mask=None, position_ids=positions, position_embeddings=rotary)
        state = rms(state[0] if isinstance(state, tuple) else state, own["shared_head.norm"], config.rms_norm_eps)
        logits = model.lm_head(state)[0, :-2] / TEMPERATURE
        total = total + cross_entropy(logits, tokens[0, 2:], reduction="none")[max(prompt - 2, 0) :].sum()
        count += len(row) - prompt
    (total / count).backward()
    gradients = {f"{name}{key}.weight": tensor.grad for key, tensor in own.items()}
    routed = torch.bincount(torch.cat(choices), minlength=config.n_routed_experts)
    return TrueStep(total.item() / count, gradients | gradients_of(model, decoder, name), routed)


def gradients_of(model: torch.nn.Module, layer: torch.nn.Module, prefix: str) -> dict[str, torch.Tensor]:
    """The gradients of a layer as a checkpoint names tensors: in memory transformers stacks experts."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(parameter.grad)
    return {n: t for n, t in saved(model).items() if n.startswith(prefix) and "e_score" not in n}


def rms(values: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return values * (values.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def hidden_states(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Of the model itself after its last norm, without the layer that predicts further tokens."""
    layers, base = model.model.layers, model.model
    base.layers, base.config.num_hidden_layers = layers[:LAYERS], LAYERS
    try:
        return base(tokens, use_cache=False).last_hidden_state
    finally:
        base.layers, base.config.num_hidden_layers = layers, LAYERS + 1
