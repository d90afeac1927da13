"""Grouped-query attention that rotates a part of each head, with routed and shared experts: GLM-4.5, GLM-4.5-Air."""

from __future__ import annotations

from typing import Any

from hybrid3d.families.dense import QK_NORM, QKV_BIAS, TENSORS, check_decoder
from hybrid3d.families.family import Family
from hybrid3d.families.shared_experts import (
    EXPERT_TENSORS,
    MTP_TENSORS,
    ROUTER_BIAS,
    check_groups,
    check_shared_experts,
    experts_of,
    mtp_layers,
    sigmoid_router,
)
from hybrid3d.families.values import Config, require_counts


def _transformer_config(config: Config) -> dict[str, Any]:
    attention = {"add_qkv_bias": config.get("attention_bias", False), "qk_layernorm": config.get("use_qk_norm", False)}
    return {**attention, **sigmoid_router(config)}


def _check(config: Config) -> None:
    check_decoder(config, norm_topk_prob=True)
    require_counts(config, "num_key_value_heads", "head_dim")  # vLLM has no default for the second
    check_shared_experts(config, min_per_token=2)
    check_groups(config)


GLM4_MOE = Family(
    "Glm4MoeForCausalLM",
    TENSORS | QKV_BIAS | QK_NORM | EXPERT_TENSORS | ROUTER_BIAS | MTP_TENSORS,
    transformer_config=_transformer_config,
    check=_check,
    experts=experts_of,
    rope_scaling="default",
    rotary_fraction=0.5,
    # Without the key both engines take the layer after the last for one.
    mtp_layers=lambda config: mtp_layers(config, default=1),
)
