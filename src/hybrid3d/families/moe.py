"""Mixtures of experts with grouped-query attention: Qwen3-MoE and Mixtral."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from hybrid3d.families.dense import HF, MEGATRON, QK_NORM, TENSORS, check_decoder
from hybrid3d.families.family import Experts, Family, RowMap, SameTensor, StackedTensors
from hybrid3d.families.values import Config, UnsupportedModel, require_counts

# Matches the number of a routed expert in the name of a canonical tensor.
EXPERT = re.compile(r"(?<=\.experts\.)\d+(?=\.)")


def is_expert(name: str) -> bool:
    """Return whether a canonical tensor belongs to a routed expert."""
    return EXPERT.search(name) is not None


def expert_tensors(block: str, gate: str, up: str, down: str) -> dict[str, RowMap]:
    """Return the table of a sparse layer's tensors.

    Args:
        block: the checkpoint's name of the MLP.
        gate, up, down: the checkpoint's names of an expert's three projections.
    """
    expert = f"{HF}{block}.experts.{{expert}}."
    return {
        f"{MEGATRON}pre_mlp_layernorm.weight": SameTensor(f"{HF}post_attention_layernorm.weight"),
        f"{MEGATRON}mlp.router.weight": SameTensor(f"{HF}{block}.gate.weight"),
        f"{MEGATRON}mlp.experts.experts.linear_fc1.weight": StackedTensors(
            (f"{expert}{gate}.weight", f"{expert}{up}.weight")
        ),
        f"{MEGATRON}mlp.experts.experts.linear_fc2.weight": SameTensor(f"{expert}{down}.weight"),
    }


def check_experts(config: Config, parse_experts: Callable[[Config], Experts], min_per_token: int) -> None:
    """Check that some layer has experts and that the number of experts per token is in range.

    Args:
        parse_experts: returns the sizes of the config's experts.
        min_per_token: smallest supported number of experts per token.

    Raises:
        UnsupportedModel: one of them does not hold.
    """
    experts = parse_experts(config)
    if not any(experts.sparse):
        raise UnsupportedModel(f"none of num_hidden_layers={len(experts.sparse)} layers has experts")
    if experts.per_token < min_per_token:
        raise UnsupportedModel(
            f"num_experts_per_tok={experts.per_token}: Megatron does not normalize the score of a single expert"
        )
    if experts.per_token > experts.count:
        raise UnsupportedModel(f"num_experts_per_tok={experts.per_token} is more than the {experts.count} experts")


def _qwen3_experts(config: Config) -> Experts:
    dense, step = config.get("mlp_only_layers") or (), config.get("decoder_sparse_step", 1)
    sparse = (layer not in dense and (layer + 1) % step == 0 for layer in range(config["num_hidden_layers"]))
    return Experts(
        config[_count_key(config)], config["num_experts_per_tok"], config["moe_intermediate_size"], tuple(sparse)
    )


def _count_key(config: Config) -> str:
    return "num_experts" if "num_experts" in config else "num_local_experts"


def _check_qwen3(config: Config) -> None:
    check_decoder(config, attention_bias=False)
    require_counts(config, "num_key_value_heads", _count_key(config), "num_experts_per_tok", "moe_intermediate_size")
    require_counts({"decoder_sparse_step": 1} | dict(config), "decoder_sparse_step")
    check_experts(config, _qwen3_experts, min_per_token=2 if config.get("norm_topk_prob") else 1)


def _check_mixtral(config: Config) -> None:
    check_decoder(config, sliding_window=None, router_jitter_noise=0.0)
    require_counts(config, "num_key_value_heads", "num_local_experts", "num_experts_per_tok")
    check_experts(config, _mixtral_experts, min_per_token=2)


def _mixtral_experts(config: Config) -> Experts:
    sparse = (True,) * config["num_hidden_layers"]
    return Experts(config["num_local_experts"], config["num_experts_per_tok"], config["intermediate_size"], sparse)


def _qwen3_config(config: Config) -> dict[str, Any]:
    # Softmax over the selected experts equals softmax over all experts, normalized over the selected ones.
    return {"qk_layernorm": True, "moe_router_pre_softmax": not config.get("norm_topk_prob", False)}


QWEN3_MOE = Family(
    "Qwen3MoeForCausalLM",
    TENSORS | QK_NORM | expert_tensors("mlp", "gate_proj", "up_proj", "down_proj"),
    transformer_config=_qwen3_config,
    check=_check_qwen3,
    experts=_qwen3_experts,
)
MIXTRAL = Family(
    "MixtralForCausalLM",
    TENSORS | expert_tensors("block_sparse_moe", "w1", "w3", "w2"),
    check=_check_mixtral,
    experts=_mixtral_experts,
    rope_theta=1e6,
)
