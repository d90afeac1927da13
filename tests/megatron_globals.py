"""Megatron's global tensors, made of a checkpoint's by its documented layout, written out once more.

What `hybrid3d.families` says in tables is said here in tensor operations, so that a wrong table cannot hide: weights
that a table puts in a wrong place and takes out of it again would come back right.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from hybrid3d.families import Config

Weights = Mapping[str, torch.Tensor]

# The end of Megatron's name, and of the checkpoint's.
RENAMED = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.q_layernorm.weight": ("self_attn.q_norm.weight", "self_attn.q_a_layernorm.weight"),
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "self_attention.kv_layernorm.weight": "self_attn.kv_a_layernorm.weight",
    "self_attention.linear_q_proj.weight": "self_attn.q_proj.weight",
    "self_attention.linear_q_down_proj.weight": "self_attn.q_a_proj.weight",
    "self_attention.linear_q_up_proj.weight": "self_attn.q_b_proj.weight",
    "self_attention.linear_kv_down_proj.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "self_attention.linear_kv_up_proj.weight": "self_attn.kv_b_proj.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    "mlp.shared_experts.linear_fc2.weight": "mlp.shared_experts.down_proj.weight",
    "mlp.router.weight": ("mlp.gate.weight", "block_sparse_moe.gate.weight"),
    "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
}
TOP = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}


def global_tensor(key: str, weights: Weights, config: Config) -> torch.Tensor:
    """One of Megatron's global tensors; experts are one behind the other in a first dim."""
    if key in TOP:
        return weights[TOP[key]]
    layer, name = re.fullmatch(r"decoder\.layers\.(\d+)\.(.*)", key).groups()
    prefix = f"model.layers.{layer}."
    if name in RENAMED:
        candidates = RENAMED[name] if isinstance(RENAMED[name], tuple) else (RENAMED[name],)
        return next(weights[prefix + c] for c in candidates if prefix + c in weights)
    if ".linear_qkv." in name:
        kind = name.rpartition(".")[2]
        return _grouped(*(weights[f"{prefix}self_attn.{x}_proj.{kind}"] for x in "qkv"), config["num_key_value_heads"])
    if name == "mlp.linear_fc1.weight":
        return _gate_up(weights, f"{prefix}mlp.", "gate_proj", "up_proj")
    if name == "mlp.shared_experts.linear_fc1.weight":
        return _gate_up(weights, f"{prefix}mlp.shared_experts.", "gate_proj", "up_proj")
    return _experts(weights, prefix, first=name == "mlp.experts.experts.linear_fc1.weight")


def _gate_up(weights: Weights, prefix: str, gate: str, up: str) -> torch.Tensor:
    return torch.cat([weights[f"{prefix}{gate}.weight"], weights[f"{prefix}{up}.weight"]])


def _grouped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, groups: int) -> torch.Tensor:
    """Per query group: its queries, its key, its value."""
    parts: list[Any] = [x.reshape(groups, x.shape[0] // groups, *x.shape[1:]) for x in (q, k, v)]
    return torch.cat(parts, dim=1).flatten(0, 1)


def _experts(weights: Weights, prefix: str, first: bool) -> torch.Tensor:
    mixtral = f"{prefix}block_sparse_moe.gate.weight" in weights
    block = f"{prefix}block_sparse_moe." if mixtral else f"{prefix}mlp."
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    count = weights[f"{block}gate.weight"].shape[0]
    experts = [f"{block}experts.{e}." for e in range(count)]
    return torch.stack([_gate_up(weights, e, gate, up) if first else weights[f"{e}{down}.weight"] for e in experts])
