"""Decoders with grouped-query attention, RMS norms and a gated SiLU: Llama, Qwen2 and 2.5, Qwen3.

Mixtures of experts with the same attention are Qwen3-MoE and Mixtral.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hybrid3d.families.family import Experts, Family, GroupedQKV, PaddedVocabulary, RowMap, SameTensor, StackedTensors
from hybrid3d.families.values import Config, UnsupportedModel, require_counts, require_values

HF = "model.layers.{layer}."
MEGATRON = "decoder.layers.{layer}."
MTP = "mtp.layers.{layer}."


def _qkv(kind: str) -> GroupedQKV:
    return GroupedQKV(*(f"{HF}self_attn.{x}_proj.{kind}" for x in "qkv"))


TENSORS: dict[str, RowMap] = {
    "embedding.word_embeddings.weight": PaddedVocabulary("model.embed_tokens.weight"),
    f"{MEGATRON}self_attention.linear_qkv.layer_norm_weight": SameTensor(f"{HF}input_layernorm.weight"),
    f"{MEGATRON}self_attention.linear_qkv.weight": _qkv("weight"),
    f"{MEGATRON}self_attention.linear_proj.weight": SameTensor(f"{HF}self_attn.o_proj.weight"),
    f"{MEGATRON}mlp.linear_fc1.layer_norm_weight": SameTensor(f"{HF}post_attention_layernorm.weight"),
    f"{MEGATRON}mlp.linear_fc1.weight": StackedTensors((f"{HF}mlp.gate_proj.weight", f"{HF}mlp.up_proj.weight")),
    f"{MEGATRON}mlp.linear_fc2.weight": SameTensor(f"{HF}mlp.down_proj.weight"),
    "decoder.final_layernorm.weight": SameTensor("model.norm.weight"),
    "output_layer.weight": PaddedVocabulary("lm_head.weight"),
}
QKV_BIAS: dict[str, RowMap] = {f"{MEGATRON}self_attention.linear_qkv.bias": _qkv("bias")}
QK_NORM: dict[str, RowMap] = {
    f"{MEGATRON}self_attention.{x}_layernorm.weight": SameTensor(f"{HF}self_attn.{x}_norm.weight") for x in "qk"
}


# Keys that change the model that vLLM computes and that transformers ignores.
_VLLM_ONLY = (
    *("dual_chunk_attention_config", "attention_chunk_size", "interleaved_sliding_window", "logit_scale"),
    *("qkv_bias", "qk_norm", "index_topk", "llama_4_scaling"),
)


def check_decoder(config: Config, **supported: Any) -> None:
    """Refuse values that no family supports, and for the keys of `supported` any value but the one given."""
    supported |= dict(hidden_act="silu", use_sliding_window=False, attention_dropout=0.0)
    require_values(config, is_causal=True, **dict.fromkeys(_VLLM_ONLY), **supported)


def _check_qwen2(config: Config) -> None:
    require_counts(config, "num_key_value_heads")
    size = config["hidden_size"] // config["num_attention_heads"]
    check_decoder(config, head_dim=config.get("head_dim") and size)  # vLLM ignores `head_dim` here


def _check_qwen3(config: Config) -> None:
    require_counts(config, "num_key_value_heads", "head_dim")
    check_decoder(config, attention_bias=False)


LLAMA = Family(
    "LlamaForCausalLM",
    TENSORS,
    # vLLM applies a sliding window here, transformers does not.
    check=lambda config: check_decoder(config, attention_bias=False, mlp_bias=False, sliding_window=None),
)
QWEN2 = Family(
    "Qwen2ForCausalLM",
    TENSORS | QKV_BIAS,
    transformer_config=lambda config: {"add_qkv_bias": True},
    check=_check_qwen2,
)
QWEN3 = Family(
    "Qwen3ForCausalLM",
    TENSORS | QK_NORM,
    transformer_config=lambda config: {"qk_layernorm": True},
    check=_check_qwen3,
)


def expert_tensors(block: str, gate: str, up: str, down: str) -> dict[str, RowMap]:
    """Return the table of a sparse layer's tensors; `block` is the checkpoint's name of the MLP."""
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
    """Raise `UnsupportedModel` unless some layer has experts and the number of experts per token is in range."""
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
    sparse = tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(config["num_hidden_layers"]))
    count = config[_count_key(config)]
    return Experts(count, config["num_experts_per_tok"], config["moe_intermediate_size"], sparse)


def _count_key(config: Config) -> str:
    return "num_experts" if "num_experts" in config else "num_local_experts"


def _check_qwen3_moe(config: Config) -> None:
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
    check=_check_qwen3_moe,
    experts=_qwen3_experts,
)
MIXTRAL = Family(
    "MixtralForCausalLM",
    TENSORS | expert_tensors("block_sparse_moe", "w1", "w3", "w2"),
    check=_check_mixtral,
    experts=_mixtral_experts,
    rope_theta=1e6,
)
