"""Configs of tiny models, for checks of GPUs.

Sizes are those that kernels for GPUs support: head sizes of 64, and for latent attention DeepSeek's own 128 + 64 and
128 (others have no prefill backend on Hopper).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybrid3d.families import Config

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
SIZES: dict[str, Any] = dict(
    vocab_size=512,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    rms_norm_eps=1e-6,
    hidden_act="silu",
    attention_dropout=0.0,
    initializer_range=0.02,
    rope_parameters=ROPE,
    bos_token_id=1,
    eos_token_id=2,
    tie_word_embeddings=False,
)
EXPERTS: dict[str, Any] = dict(num_experts_per_tok=2, moe_intermediate_size=128, norm_topk_prob=True)
LATENTS: dict[str, Any] = dict(
    q_lora_rank=128, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
)

CONFIGS: Mapping[str, Config] = {
    "dense": SIZES | dict(architectures=["Qwen2ForCausalLM"], model_type="qwen2", use_sliding_window=False),
    "experts": SIZES
    | EXPERTS
    | dict(
        architectures=["Qwen3MoeForCausalLM"],
        model_type="qwen3_moe",
        head_dim=64,
        num_experts=8,
        decoder_sparse_step=1,
        mlp_only_layers=[1],
        attention_bias=False,
        use_sliding_window=False,
    ),
    "mixtral": SIZES
    | dict(
        architectures=["MixtralForCausalLM"],
        model_type="mixtral",
        num_local_experts=8,
        num_experts_per_tok=2,
        sliding_window=None,
    ),
    "latent": SIZES
    | EXPERTS
    | LATENTS
    | dict(
        architectures=["DeepseekV3ForCausalLM"],
        model_type="deepseek_v3",
        num_key_value_heads=SIZES["num_attention_heads"],
        n_routed_experts=8,
        n_shared_experts=1,
        n_group=2,
        topk_group=1,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        routed_scaling_factor=2.5,
        first_k_dense_replace=1,
        moe_layer_freq=1,
        attention_bias=False,
    ),
}
