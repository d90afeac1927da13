"""Dense layers first, then routed beside shared experts, chosen by sigmoid scores with a bias: DeepSeek and GLM-4.5."""

from __future__ import annotations

from typing import Any

from hybrid3d.families.dense import HF, MEGATRON, MTP
from hybrid3d.families.family import Experts, RowMap, SameTensor, StackedTensors
from hybrid3d.families.moe import check_experts, expert_tensors
from hybrid3d.families.values import Config, UnsupportedModel, require_counts, require_values

SHARED_EXPERTS: dict[str, RowMap] = {
    f"{MEGATRON}mlp.shared_experts.linear_fc1.weight": StackedTensors(
        (f"{HF}mlp.shared_experts.gate_proj.weight", f"{HF}mlp.shared_experts.up_proj.weight")
    ),
    f"{MEGATRON}mlp.shared_experts.linear_fc2.weight": SameTensor(f"{HF}mlp.shared_experts.down_proj.weight"),
}
EXPERT_TENSORS = expert_tensors("mlp", "gate_proj", "up_proj", "down_proj") | SHARED_EXPERTS
ROUTER_BIAS: dict[str, RowMap] = {
    f"{MEGATRON}mlp.router.expert_bias": SameTensor(f"{HF}mlp.gate.e_score_correction_bias")
}
# Of a layer for multi-token prediction, around a decoder layer (arXiv 2412.19437, section 2.2)
MTP_TENSORS: dict[str, RowMap] = {
    f"{MTP}{ours}": SameTensor(f"{HF}{name}")
    for ours, name in (
        ("enorm.weight", "enorm.weight"),
        ("hnorm.weight", "hnorm.weight"),
        ("eh_proj.weight", "eh_proj.weight"),
        ("final_layernorm.weight", "shared_head.norm.weight"),
    )
}
EXPERT_COUNTS = (
    "n_routed_experts",
    "num_experts_per_tok",
    "n_shared_experts",
    "moe_intermediate_size",
    "n_group",
    "topk_group",
)


def experts_of(config: Config) -> Experts:
    """Return the sizes of the experts, which all layers from `first_k_dense_replace` on have."""
    sparse = tuple(layer >= config["first_k_dense_replace"] for layer in range(config["num_hidden_layers"]))
    width = config["moe_intermediate_size"]
    shared = width * config["n_shared_experts"]
    return Experts(config["n_routed_experts"], config["num_experts_per_tok"], width, sparse, shared)


def router_settings(config: Config) -> dict[str, Any]:
    """Return Megatron's settings of a router that computes in float32 and scales its weights."""
    return {"moe_router_dtype": "fp32", "moe_router_topk_scaling_factor": config["routed_scaling_factor"]}


def sigmoid_router(config: Config) -> dict[str, Any]:
    """Return Megatron's settings of a router with sigmoid scores and a bias that decides the choice only."""
    groups = config["n_group"]
    grouped = {"moe_router_num_groups": groups, "moe_router_group_topk": config["topk_group"]} if groups > 1 else {}
    scores = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    return {**router_settings(config), **scores, **grouped}


def check_shared_experts(config: Config, min_per_token: int) -> None:
    """Check that every size of the experts is given, and that no value differs that vLLM or transformers ignores."""
    require_counts(config, *EXPERT_COUNTS)
    require_counts(config, "first_k_dense_replace", minimum=0)
    if not isinstance(config.get("routed_scaling_factor"), (int, float)):
        raise UnsupportedModel(f"routed_scaling_factor={config.get('routed_scaling_factor')!r}: expected a number")
    require_values(config, moe_layer_freq=1, tie_word_embeddings=False, sliding_window=None)
    check_experts(config, experts_of, min_per_token)


def check_groups(config: Config) -> None:
    """Check the groups of experts.

    The models score a group by its two best experts (arXiv 2412.19437), Megatron by its best topk // topk_group.
    """
    groups, topk_group, per_token = config["n_group"], config["topk_group"], config["num_experts_per_tok"]
    if config["n_routed_experts"] % groups or topk_group > groups:
        raise UnsupportedModel(
            f"n_group={groups} and topk_group={topk_group}: n_group must divide n_routed_experts="
            f"{config['n_routed_experts']}, and topk_group must not exceed n_group"
        )
    if groups > 1 and per_token // topk_group != 2:
        raise UnsupportedModel(
            f"num_experts_per_tok={per_token} and topk_group={topk_group}: Megatron selects groups by their best "
            f"{per_token}//{topk_group}={per_token // topk_group} experts, this model by their best 2"
        )


def mtp_layers(config: Config, default: int = 0) -> range:
    """Return the numbers of the layers for multi-token prediction, which follow the model's layers.

    Args:
        default: their number where the config has none.
    """
    first, count = config["num_hidden_layers"], config.get("num_nextn_predict_layers")
    count = default if count is None else count
    return range(first, first + count)
