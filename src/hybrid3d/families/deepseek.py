"""Multi-head latent attention with routed and shared experts: DeepSeek-V3, Moonlight, DeepSeek-V2-Lite."""

from __future__ import annotations

from typing import Any

from hybrid3d.families.dense import HF, MEGATRON, TENSORS, check_decoder
from hybrid3d.families.family import Experts, Family, Latents, RowMap, SameTensor, StackedTensors
from hybrid3d.families.moe import check_experts, expert_tensors
from hybrid3d.families.rope import rope_of
from hybrid3d.families.values import Config, UnsupportedModel, require_counts, require_values

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
SHARED_EXPERTS: dict[str, RowMap] = {
    f"{MEGATRON}mlp.shared_experts.linear_fc1.weight": StackedTensors(
        (f"{HF}mlp.shared_experts.gate_proj.weight", f"{HF}mlp.shared_experts.up_proj.weight")
    ),
    f"{MEGATRON}mlp.shared_experts.linear_fc2.weight": SameTensor(f"{HF}mlp.shared_experts.down_proj.weight"),
}
DEEPSEEK = TENSORS | LATENT_ATTENTION | expert_tensors("mlp", "gate_proj", "up_proj", "down_proj") | SHARED_EXPERTS
ROUTER_BIAS: dict[str, RowMap] = {
    f"{MEGATRON}mlp.router.expert_bias": SameTensor(f"{HF}mlp.gate.e_score_correction_bias")
}


def _experts(config: Config) -> Experts:
    sparse = tuple(layer >= config["first_k_dense_replace"] for layer in range(config["num_hidden_layers"]))
    width = config["moe_intermediate_size"]
    shared = width * config["n_shared_experts"]
    return Experts(config["n_routed_experts"], config["num_experts_per_tok"], width, sparse, shared)


def _latents(config: Config) -> Latents:
    return Latents(
        config["q_lora_rank"] or 0,
        config["kv_lora_rank"],
        config["qk_nope_head_dim"],
        config["qk_rope_head_dim"],
        config["v_head_dim"],
    )


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


def _settings(config: Config, **routing: Any) -> dict[str, Any]:
    scaling = config["routed_scaling_factor"]
    router = {"moe_router_dtype": "fp32", "moe_router_topk_scaling_factor": scaling, **routing}
    return {"qk_layernorm": True, **_rotary(config), **router}


def _v3_config(config: Config) -> dict[str, Any]:
    groups = config["n_group"]
    grouped = {"moe_router_num_groups": groups, "moe_router_group_topk": config["topk_group"]} if groups > 1 else {}
    return _settings(config, moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True, **grouped)


def _v2_config(config: Config) -> dict[str, Any]:
    return _settings(config, moe_router_pre_softmax=True)


COUNTS = (
    *("n_routed_experts", "num_experts_per_tok", "n_shared_experts", "moe_intermediate_size", "n_group", "topk_group"),
    *("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
)


def _check(config: Config, min_per_token: int) -> None:
    """Check what both generations share: every size is given, and no value that vLLM or transformers ignores."""
    require_counts(config, *COUNTS, *(["q_lora_rank"] if config.get("q_lora_rank", 0) is not None else []))
    require_counts(config, "first_k_dense_replace", minimum=0)
    if not isinstance(config.get("routed_scaling_factor"), (int, float)):
        raise UnsupportedModel(f"routed_scaling_factor={config.get('routed_scaling_factor')!r}: expected a number")
    require_values(config, moe_layer_freq=1, tie_word_embeddings=False, sliding_window=None)
    check_experts(config, _experts, min_per_token)


def _check_v3(config: Config) -> None:
    """Check a DeepSeek-V3 config.

    The model scores a group by its two best experts (arXiv 2412.19437), Megatron by its best topk // topk_group.
    """
    check_decoder(config, attention_bias=False, rope_interleave=True, norm_topk_prob=True)
    _check(config, min_per_token=2)
    # Without these keys vLLM routes as in DeepSeek-V2, which differs.
    require_values(
        {"scoring_func": None, "topk_method": None} | dict(config), scoring_func="sigmoid", topk_method="noaux_tc"
    )
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


def _check_v2(config: Config) -> None:
    check_decoder(config, attention_bias=False, mlp_bias=False, norm_topk_prob=False)
    _check(config, min_per_token=1)
    if config.get("topk_method", "greedy") != "greedy":
        raise UnsupportedModel(
            f"topk_method={config['topk_method']!r}: this model selects groups by their best expert, Megatron by the "
            "sum of several; only 'greedy' is supported"
        )
    # vLLM scores groups whatever the method is, so that n_group=1 and topk_group=1 must be explicit.
    require_values(
        {"n_group": None, "topk_group": None} | dict(config), scoring_func="softmax", n_group=1, topk_group=1
    )


def _mtp_tensors(config: Config) -> list[str]:
    """Return the patterns of multi-token-prediction layers, which are numbered after the model's layers."""
    first, count = config["num_hidden_layers"], config.get("num_nextn_predict_layers") or 0
    return [f"model.layers.{layer}.*" for layer in range(first, first + count)]


DEEPSEEK_V3 = Family(
    "DeepseekV3ForCausalLM",
    DEEPSEEK | ROUTER_BIAS,
    transformer_config=_v3_config,
    check=_check_v3,
    experts=_experts,
    latents=_latents,
    rope_scaling="yarn",
    untrained=_mtp_tensors,
)
DEEPSEEK_V2 = Family(
    "DeepseekV2ForCausalLM",
    DEEPSEEK,
    transformer_config=_v2_config,
    check=_check_v2,
    experts=_experts,
    latents=_latents,
    rope_scaling="yarn",
)
