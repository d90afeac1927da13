"""Dense decoders with grouped-query attention, RMS norms and a gated SiLU: Llama, Qwen2 and 2.5, Qwen3."""

from __future__ import annotations

from typing import Any

from hybrid3d.families.family import Family, GroupedQKV, PaddedVocabulary, RowMap, SameTensor, StackedTensors
from hybrid3d.families.values import Config, require_counts, require_values

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
