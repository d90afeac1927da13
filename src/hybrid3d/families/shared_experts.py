"""Dense layers first, then routed beside shared experts, chosen by sigmoid scores with a bias: DeepSeek and GLM-4.5.

DeepSeek-V3, Kimi-K2, Moonlight and DeepSeek-V2-Lite have multi-head latent attention. GLM-4.5 and GLM-4.5-Air have
grouped-query attention, which rotates a part of each head.
"""

from __future__ import annotations

from typing import Any

from hybrid3d.families.family import Experts, Family, Latents, RowMap, SameTensor, StackedTensors
from hybrid3d.families.grouped_query import (
    HF,
    MEGATRON,
    MTP,
    QK_NORM,
    QKV_BIAS,
    TENSORS,
    check_decoder,
    check_experts,
    expert_tensors,
)
from hybrid3d.families.rope import rope_of
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
    **{f"{MTP}{name}.weight": SameTensor(f"{HF}{name}.weight") for name in ("enorm", "hnorm", "eh_proj")},
    f"{MTP}final_layernorm.weight": SameTensor(f"{HF}shared_head.norm.weight"),
}
EXPERT_COUNTS = (
    "n_routed_experts",
    "num_experts_per_tok",
    "n_shared_experts",
    "moe_intermediate_size",
    "n_group",
    "topk_group",
)


def _experts_of(config: Config) -> Experts:
    """Return the sizes of the experts, which all layers from `first_k_dense_replace` on have."""
    sparse = tuple(layer >= config["first_k_dense_replace"] for layer in range(config["num_hidden_layers"]))
    width = config["moe_intermediate_size"]
    shared = width * config["n_shared_experts"]
    return Experts(config["n_routed_experts"], config["num_experts_per_tok"], width, sparse, shared)


def _router_settings(config: Config) -> dict[str, Any]:
    """Return Megatron's settings of a router that computes in float32 and scales its weights."""
    return {"moe_router_dtype": "fp32", "moe_router_topk_scaling_factor": config["routed_scaling_factor"]}


def _sigmoid_router(config: Config) -> dict[str, Any]:
    """Return Megatron's settings of a router with sigmoid scores and a bias that decides the choice only."""
    groups = config["n_group"]
    grouped = {"moe_router_num_groups": groups, "moe_router_group_topk": config["topk_group"]} if groups > 1 else {}
    scores = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    return {**_router_settings(config), **scores, **grouped}


def _check_shared_experts(config: Config, min_per_token: int) -> None:
    """Check that every size of the experts is given, and that no value differs that vLLM or transformers ignores."""
    require_counts(config, *EXPERT_COUNTS)
    require_counts(config, "first_k_dense_replace", minimum=0)
    if not isinstance(config.get("routed_scaling_factor"), (int, float)):
        raise UnsupportedModel(f"routed_scaling_factor={config.get('routed_scaling_factor')!r}: expected a number")
    require_values(config, moe_layer_freq=1, tie_word_embeddings=False, sliding_window=None)
    check_experts(config, _experts_of, min_per_token)


def _check_groups(config: Config) -> None:
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


def _mtp_layers(config: Config, default: int = 0) -> range:
    """Return the layers for multi-token prediction, after the model's; `default` many where the config says nothing."""
    first, count = config["num_hidden_layers"], config.get("num_nextn_predict_layers")
    return range(first, first + (default if count is None else count))


ATTENTION = f"{MEGATRON}self_attention."
# Some norms are separate modules here; under Transformer Engine they are part of the linear layer that follows.
LATENT_ATTENTION: dict[str, RowMap] = {
    f"{MEGATRON}input_layernorm.weight": SameTensor(f"{HF}input_layernorm.weight"),
    f"{ATTENTION}linear_q_proj.weight": SameTensor(f"{HF}self_attn.q_proj.weight"),
    f"{ATTENTION}linear_q_down_proj.weight": SameTensor(f"{HF}self_attn.q_a_proj.weight"),
    f"{ATTENTION}linear_q_up_proj.weight": SameTensor(f"{HF}self_attn.q_b_proj.weight"),
    f"{ATTENTION}linear_kv_down_proj.weight": SameTensor(f"{HF}self_attn.kv_a_proj_with_mqa.weight"),
    f"{ATTENTION}linear_kv_up_proj.weight": SameTensor(f"{HF}self_attn.kv_b_proj.weight"),
    **{
        f"{ATTENTION}{norm}": SameTensor(f"{HF}self_attn.{x}_a_layernorm.weight")
        for x in ("q", "kv")
        for norm in (f"{x}_layernorm.weight", f"linear_{x}_up_proj.layer_norm_weight")
    },
}
LATENT_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
DEEPSEEK = TENSORS | LATENT_ATTENTION | EXPERT_TENSORS


def _latents(config: Config) -> Latents:
    return Latents(config["q_lora_rank"] or 0, *(config[key] for key in LATENT_SIZES))


def _rotary(config: Config) -> dict[str, Any]:
    rope = rope_of(config, "yarn")
    if rope.yarn is None:
        return {"rope_type": "rope", "rotary_base": rope.theta, "rotary_scaling_factor": 1.0}
    return {
        "rope_type": "yarn",
        "rotary_base": rope.theta,
        "rotary_scaling_factor": rope.yarn["factor"],
        "original_max_position_embeddings": rope.yarn["original_max_position_embeddings"],
        "beta_fast": rope.yarn.get("beta_fast", 32),
        "beta_slow": rope.yarn.get("beta_slow", 1),
        "mscale": rope.yarn.get("mscale", 1.0),
        "mscale_all_dim": rope.yarn.get("mscale_all_dim", 0.0),
    }


def _v3_config(config: Config) -> dict[str, Any]:
    return {"qk_layernorm": True, **_rotary(config), **_sigmoid_router(config)}


def _v2_config(config: Config) -> dict[str, Any]:
    return {"qk_layernorm": True, **_rotary(config), **_router_settings(config), "moe_router_pre_softmax": True}


COUNTS = (*EXPERT_COUNTS, *LATENT_SIZES)


def _check_deepseek(config: Config, min_per_token: int) -> None:
    """Check what both generations share: every size is given, and no value that vLLM or transformers ignores."""
    require_counts(config, *COUNTS, *(["q_lora_rank"] if config.get("q_lora_rank", 0) is not None else []))
    _check_shared_experts(config, min_per_token)


def _check_v3(config: Config) -> None:
    check_decoder(config, attention_bias=False, rope_interleave=True, norm_topk_prob=True)
    _check_deepseek(config, min_per_token=2)
    # Without these keys vLLM routes as in DeepSeek-V2, which differs.
    require_values(
        {"scoring_func": None, "topk_method": None} | dict(config), scoring_func="sigmoid", topk_method="noaux_tc"
    )
    _check_groups(config)


def _check_v2(config: Config) -> None:
    check_decoder(config, attention_bias=False, mlp_bias=False, norm_topk_prob=False)
    _check_deepseek(config, min_per_token=1)
    if config.get("topk_method", "greedy") != "greedy":
        raise UnsupportedModel(
            f"topk_method={config['topk_method']!r}: this model selects groups by their best expert, Megatron by the "
            "sum of several; only 'greedy' is supported"
        )
    # vLLM scores groups whatever the method is, so that n_group=1 and topk_group=1 must be explicit.
    require_values(
        {"n_group": None, "topk_group": None} | dict(config), scoring_func="softmax", n_group=1, topk_group=1
    )


DEEPSEEK_V3 = Family(
    "DeepseekV3ForCausalLM",
    DEEPSEEK | ROUTER_BIAS | MTP_TENSORS,
    transformer_config=_v3_config,
    check=_check_v3,
    experts=_experts_of,
    latents=_latents,
    rope_scaling="yarn",
    mtp_layers=_mtp_layers,
    # Of Kimi-K2, whose own code is downloaded and not needed: vLLM reads its config with this class too.
    model_types={"kimi_k2": "deepseek_v3"},
)
DEEPSEEK_V2 = Family(
    "DeepseekV2ForCausalLM",
    DEEPSEEK,
    transformer_config=_v2_config,
    check=_check_v2,
    experts=_experts_of,
    latents=_latents,
    rope_scaling="yarn",
)


def _glm_config(config: Config) -> dict[str, Any]:
    attention = {"add_qkv_bias": config.get("attention_bias", False), "qk_layernorm": config.get("use_qk_norm", False)}
    return {**attention, **_sigmoid_router(config)}


def _check_glm(config: Config) -> None:
    check_decoder(config, norm_topk_prob=True)
    require_counts(config, "num_key_value_heads", "head_dim")  # vLLM has no default for the second
    _check_shared_experts(config, min_per_token=2)
    _check_groups(config)


GLM4_MOE = Family(
    "Glm4MoeForCausalLM",
    TENSORS | QKV_BIAS | QK_NORM | EXPERT_TENSORS | ROUTER_BIAS | MTP_TENSORS,
    transformer_config=_glm_config,
    check=_check_glm,
    experts=_experts_of,
    rope_scaling="default",
    rotary_fraction=0.5,
    # Without the key both engines take the layer after the last for one.
    mtp_layers=lambda config: _mtp_layers(config, default=1),
)
