"""Checks of a checkpoint's `config.json` that hold for all families: families that are known and not supported, values.

For a family that is not supported a table has what is missing in which engine, and here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hybrid3d.errors import UserMistake

Config = Mapping[str, Any]
"""A parsed Hugging Face `config.json`."""


class UnsupportedModel(UserMistake):
    """A model that this version would not compute correctly; the message has the key, its value and the reason."""


# Largest accepted value of each count: above those of all published models, and small enough that products of a few
# counts do not overflow in the engines.
COUNTS = {
    "num_hidden_layers": 1_000,
    "hidden_size": 2**20,
    "intermediate_size": 2**22,
    "moe_intermediate_size": 2**22,
    "num_attention_heads": 2**12,
    "num_key_value_heads": 2**12,
    "head_dim": 2**12,
    "vocab_size": 2**24,
    # vLLM and transformers allocate tables with one row per position.
    "max_position_embeddings": 2**22,
    "original_max_position_embeddings": 2**22,
    "num_experts": 2**12,
    "num_local_experts": 2**12,
    "n_routed_experts": 2**12,
    "num_experts_per_tok": 2**12,
    "n_shared_experts": 2**8,
    "n_group": 2**12,
    "topk_group": 2**12,
    "kv_lora_rank": 2**16,
    "q_lora_rank": 2**16,
    "qk_nope_head_dim": 2**12,
    "qk_rope_head_dim": 2**12,
    "v_head_dim": 2**12,
    "decoder_sparse_step": 1_000,
    "moe_layer_freq": 1_000,
}
_NON_NEGATIVE = {"first_k_dense_replace": 1_000, "num_nextn_predict_layers": 1_000, "max_window_layers": 1_000}
_BOOLEANS = (
    *("tie_word_embeddings", "attention_bias", "mlp_bias", "norm_topk_prob", "use_sliding_window", "is_causal"),
    *("rope_interleave", "use_qk_norm"),
)
_NUMBERS = ("rms_norm_eps", "rope_theta", "routed_scaling_factor", "attention_dropout", "partial_rotary_factor")
_STRINGS = ("model_type", "hidden_act", "scoring_func", "topk_method")
_OBJECTS = ("rope_parameters", "rope_scaling", "quantization_config", "auto_map")
_TOKENS = ("eos_token_id", "bos_token_id", "pad_token_id")
# Nested configs, which transformers and vLLM would use instead of the outer one.
NESTED_CONFIGS = (
    "text_config",
    "decoder",
    "generator",
    "text_encoder",
    "thinker_config",
    "llm_config",
    "language_config",
)


def is_finite_number(value: object) -> bool:
    """Return whether a value is a finite number; a boolean is not."""
    # `math.isfinite` raises OverflowError for an integer larger than any float.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def config_problems(config: Config) -> Iterator[str]:
    """Yield `key=value: expected ...` for every value that no engine could use. A null counts as missing."""
    for key, value in config.items():
        expected = None if value is None else _expected(key, value, config)
        if expected is not None:
            yield f"{key}={abbreviate(value)}: expected {expected}"


def abbreviate(value: object) -> str:
    """Return the `repr` of a value for a message, cut to 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _expected(key: str, value: Any, config: Config) -> str | None:
    """Return what is expected of a key's value; None if the value is valid."""
    if key in COUNTS or key in _NON_NEGATIVE:
        minimum, maximum = (1, COUNTS[key]) if key in COUNTS else (0, _NON_NEGATIVE[key])
        valid = type(value) is int and minimum <= value <= maximum
        return None if valid else f"an integer from {minimum} to {maximum:,}"
    if key in _NUMBERS:
        return _expected_number(key, value)
    for keys, value_type, description in ((_BOOLEANS, bool, "true or false"), (_STRINGS, str, "a string")):
        if key in keys:
            return None if type(value) is value_type else description
    if key in _OBJECTS:
        return None if isinstance(value, Mapping) else "an object"
    if key in NESTED_CONFIGS:
        return "null: models with nested configs are not supported"
    if key == "architectures":
        valid = isinstance(value, list) and bool(value) and all(isinstance(name, str) for name in value)
        return None if valid else "a list with the name of the architecture"
    return _expected_layers(key, value, config) or _expected_token(key, value, config)


def _expected_number(key: str, value: Any) -> str | None:
    if key == "rms_norm_eps":
        valid, expected = isinstance(value, float) and 0 < value < 1, "a float above 0 and below 1, such as 1e-06"
    elif key == "attention_dropout":
        valid, expected = is_finite_number(value) and 0 <= value <= 1, "a number from 0 to 1"
    else:
        valid, expected = is_finite_number(value) and 0 < value < 1e30, "a number above 0"
    return None if valid else expected


def _expected_layers(key: str, value: Any, config: Config) -> str | None:
    """Return what is expected of the keys that list layers; None if the value is valid or the key is another."""
    layers = config.get("num_hidden_layers")
    if key == "layer_types":
        valid = isinstance(value, list) and all(layer_type == "full_attention" for layer_type in value)
        return None if valid and len(value) == layers else f"'full_attention' for each of {layers} layers"
    if key == "mlp_only_layers":
        valid = isinstance(value, list) and all(type(layer) is int and layer >= 0 for layer in value)
        return None if valid else "a list of layer numbers"
    return None


def _expected_token(key: str, value: Any, config: Config) -> str | None:
    """Return what is expected of special tokens: -1 means none, and `eos_token_id` may be a list."""
    if key not in _TOKENS:
        return None
    size = config.get("vocab_size")
    tokens = value if isinstance(value, list) and key == "eos_token_id" else [value]
    if not all(type(token) is int and token >= -1 for token in tokens):
        return "the id of a token"
    if type(size) is int and any(token >= size for token in tokens):
        return f"the id of a token, below vocab_size={size}"
    return None


def require_values(config: Config, **supported: Any) -> None:
    """Raise `UnsupportedModel` for the first of these keys that has another value than the one given."""
    for key, value in supported.items():
        if config.get(key, value) != value:
            raise UnsupportedModel(f"{key}={config[key]!r}: only {value!r} is supported")


def require_counts(config: Config, *keys: str, minimum: int = 1) -> None:
    """Raise `UnsupportedModel` with every key that is missing, no integer or below `minimum`.

    The libraries have different defaults for missing ones.
    """
    invalid = [
        f"{key}: {repr(config[key]) if key in config else 'missing'}"
        for key in keys
        if type(config.get(key)) is not int or config[key] < minimum
    ]
    if invalid:
        raise UnsupportedModel(f"config.json requires integers of at least {minimum} for {', '.join(invalid)}")


@dataclass(frozen=True)
class Unsupported:
    """What is missing for a family, by Megatron-Core, vLLM or hybrid3d, and supported models of similar sizes."""

    family: str
    missing: dict[str, str]
    instead: str


_TABLE = (
    "a table of projections that mix rows of queries, keys, values and gates; layers that differ in their attention"
)
_LINEAR_ATTENTION = {
    "Megatron-Core 0.16.1": "linear attention (GatedDeltaNet) without CUDA and the package flash-linear-attention, and "
    "with packed sequences (train.packed) or context parallelism (train.cp)",
    "vLLM 0.32.0": "prefix caching of linear attention without chunked prefill, which is off on CPUs",
    "hybrid3d": _TABLE,
}
_NESTED = {"hybrid3d": f"{_TABLE}; configs with the language model in text_config"}
_QWEN3 = "Qwen3 and Qwen3-MoE (Qwen3ForCausalLM, Qwen3MoeForCausalLM)"

UNSUPPORTED = {
    "Qwen3NextForCausalLM": Unsupported("Qwen3-Next", _LINEAR_ATTENTION, _QWEN3),
    "Qwen3_5ForCausalLM": Unsupported("Qwen3.5", _LINEAR_ATTENTION, _QWEN3),
    "Qwen3_5MoeForCausalLM": Unsupported("Qwen3.5", _LINEAR_ATTENTION, _QWEN3),
    "Qwen3_5ForConditionalGeneration": Unsupported("Qwen3.5", _LINEAR_ATTENTION | _NESTED, _QWEN3),
    "Qwen3_5MoeForConditionalGeneration": Unsupported("Qwen3.5", _LINEAR_ATTENTION | _NESTED, _QWEN3),
    "GptOssForCausalLM": Unsupported(
        "gpt-oss",
        {
            "Megatron-Core 0.16.1": "attention with sinks (softmax_type=learnable) without CUDA",
            "hybrid3d": "attention with sinks and a sliding window on CPUs; tables of experts that are stored "
            "transposed, with gate and up in alternating columns; a record of vLLM's loader, which copies them "
            "transposed; reading MXFP4",
        },
        "GLM-4.5-Air and Qwen3-30B-A3B (Glm4MoeForCausalLM, Qwen3MoeForCausalLM)",
    ),
}
"""By architecture, as in a checkpoint's `config.json`."""


def refuse_unsupported(config: Config) -> None:
    """Raise `UnsupportedModel` for a family in `UNSUPPORTED`, with what is missing and what is supported instead."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if not isinstance(name, str) or name not in UNSUPPORTED:
        return
    found = UNSUPPORTED[name]
    missing = "; ".join(f"in {where}: {what}" for where, what in found.missing.items())
    raise UnsupportedModel(f"{found.family} ({name}) is not supported. Missing {missing}. Supported: {found.instead}")
