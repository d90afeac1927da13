"""Multi-head latent attention with routed and shared experts: DeepSeek-V3, Kimi-K2, Moonlight, DeepSeek-V2-Lite."""

from __future__ import annotations

from typing import Any

from hybrid3d.families.dense import HF, MEGATRON, TENSORS, check_decoder
from hybrid3d.families.family import Family, Latents, RowMap, SameTensor
from hybrid3d.families.rope import rope_of
from hybrid3d.families.shared_experts import (
    EXPERT_COUNTS,
    EXPERT_TENSORS,
    MTP_TENSORS,
    ROUTER_BIAS,
    check_groups,
    check_shared_experts,
    experts_of,
    mtp_layers,
    router_settings,
    sigmoid_router,
)
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
DEEPSEEK = TENSORS | LATENT_ATTENTION | EXPERT_TENSORS


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


def _v3_config(config: Config) -> dict[str, Any]:
    return {"qk_layernorm": True, **_rotary(config), **sigmoid_router(config)}


def _v2_config(config: Config) -> dict[str, Any]:
    return {"qk_layernorm": True, **_rotary(config), **router_settings(config), "moe_router_pre_softmax": True}


COUNTS = (*EXPERT_COUNTS, "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def _check(config: Config, min_per_token: int) -> None:
    """Check what both generations share: every size is given, and no value that vLLM or transformers ignores."""
    require_counts(config, *COUNTS, *(["q_lora_rank"] if config.get("q_lora_rank", 0) is not None else []))
    check_shared_experts(config, min_per_token)


def _check_v3(config: Config) -> None:
    check_decoder(config, attention_bias=False, rope_interleave=True, norm_topk_prob=True)
    _check(config, min_per_token=2)
    # Without these keys vLLM routes as in DeepSeek-V2, which differs.
    require_values(
        {"scoring_func": None, "topk_method": None} | dict(config), scoring_func="sigmoid", topk_method="noaux_tc"
    )
    check_groups(config)


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


DEEPSEEK_V3 = Family(
    "DeepseekV3ForCausalLM",
    DEEPSEEK | ROUTER_BIAS | MTP_TENSORS,
    transformer_config=_v3_config,
    check=_check_v3,
    experts=experts_of,
    latents=_latents,
    rope_scaling="yarn",
    mtp_layers=mtp_layers,
    # Of Kimi-K2, whose own code is downloaded and not needed: vLLM reads its config with this class too.
    model_types={"kimi_k2": "deepseek_v3"},
)
DEEPSEEK_V2 = Family(
    "DeepseekV2ForCausalLM",
    DEEPSEEK,
    transformer_config=_v2_config,
    check=_check_v2,
    experts=experts_of,
    latents=_latents,
    rope_scaling="yarn",
)
