"""Mixtures of experts with grouped-query attention: Qwen3-MoE and Mixtral."""

from __future__ import annotations

from typing import Any

from hybrid3d.families.dense import HF, MEGATRON, QK_NORM, TENSORS, check_decoder
from hybrid3d.families.family import Config, Experts, Family, RowMap, Same, Stacked


def experts_of(block: str, gate: str, up: str, down: str) -> dict[str, RowMap]:
    """A sparse layer's tensors, whose checkpoint calls the block and an expert's three projections so."""
    expert = f"{HF}{block}.experts.{{expert}}."
    return {
        f"{MEGATRON}pre_mlp_layernorm.weight": Same(f"{HF}post_attention_layernorm.weight"),
        f"{MEGATRON}mlp.router.weight": Same(f"{HF}{block}.gate.weight"),
        f"{MEGATRON}mlp.experts.experts.linear_fc1.weight": Stacked((f"{expert}{gate}.weight", f"{expert}{up}.weight")),
        f"{MEGATRON}mlp.experts.experts.linear_fc2.weight": Same(f"{expert}{down}.weight"),
    }


def _qwen3_experts(config: Config) -> Experts:
    dense, step = config.get("mlp_only_layers") or (), config.get("decoder_sparse_step", 1)
    sparse = (layer not in dense and (layer + 1) % step == 0 for layer in range(config["num_hidden_layers"]))
    count = config.get("num_experts") or config["num_local_experts"]
    return Experts(count, config["num_experts_per_tok"], config["moe_intermediate_size"], tuple(sparse))


def _mixtral_experts(config: Config) -> Experts:
    sparse = (True,) * config["num_hidden_layers"]
    return Experts(config["num_local_experts"], config["num_experts_per_tok"], config["intermediate_size"], sparse)


def _qwen3_config(config: Config) -> dict[str, Any]:
    # Softmax over the chosen experts is softmax over all, divided by the sum of the chosen.
    return {"qk_layernorm": True, "moe_router_pre_softmax": not config.get("norm_topk_prob", False)}


QWEN3_MOE = Family(
    "Qwen3MoeForCausalLM",
    TENSORS | QK_NORM | experts_of("mlp", "gate_proj", "up_proj", "down_proj"),
    transformer_config=_qwen3_config,
    check=lambda config: check_decoder(config, attention_bias=False),
    experts=_qwen3_experts,
)
MIXTRAL = Family(
    "MixtralForCausalLM",
    TENSORS | experts_of("block_sparse_moe", "w1", "w3", "w2"),
    check=lambda config: check_decoder(config, sliding_window=None, router_jitter_noise=0.0),
    experts=_mixtral_experts,
)
