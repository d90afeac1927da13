"""What the values of a checkpoint's `config.json` may be: their types and bounds, for all families."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from hybrid3d.errors import UserMistake

Config = Mapping[str, Any]
"""A Hugging Face `config.json`."""


class UnsupportedModel(UserMistake):
    """A model that this version would not compute faithfully: the message gives the key, its value and the reason."""


# The largest value of each count: beyond every published model, and small enough that products of a few of them are
# sizes that engines can still multiply.
COUNTS = {
    "num_hidden_layers": 1_000,
    "hidden_size": 2**20,
    "intermediate_size": 2**22,
    "moe_intermediate_size": 2**22,
    "num_attention_heads": 2**12,
    "num_key_value_heads": 2**12,
    "head_dim": 2**12,
    "vocab_size": 2**24,
    # vLLM and transformers make a table of a row a position.
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
_NOT_NEGATIVE = {"first_k_dense_replace": 1_000, "num_nextn_predict_layers": 1_000, "max_window_layers": 1_000}
_TRUTHS = (
    *("tie_word_embeddings", "attention_bias", "mlp_bias", "norm_topk_prob", "use_sliding_window", "is_causal"),
    *("rope_interleave",),
)
_NUMBERS = ("rms_norm_eps", "rope_theta", "routed_scaling_factor", "attention_dropout", "partial_rotary_factor")
_TEXTS = ("model_type", "hidden_act", "scoring_func", "topk_method")
_TABLES = ("rope_parameters", "rope_scaling", "quantization_config", "auto_map")
_TOKENS = ("eos_token_id", "bos_token_id", "pad_token_id")
# A config within the config, which transformers and vLLM would take in its place.
NESTED = ("text_config", "decoder", "generator", "text_encoder", "thinker_config", "llm_config", "language_config")


def is_finite_number(value: object) -> bool:
    """Whether this is a finite number, and not a truth value."""
    # A comparison, because `math.isfinite` raises at an integer beyond the floats
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def config_problems(config: Config) -> Iterator[str]:
    """Every value that no engine could use, as `key=value: what is expected`. A null counts as left out."""
    for key, value in config.items():
        expected = None if value is None else _expected(key, value, config)
        if expected is not None:
            yield f"{key}={abbreviate(value)}: expected {expected}"


def abbreviate(value: object) -> str:
    """A value as a message shows it."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _expected(key: str, value: Any, config: Config) -> str | None:
    """What is expected of a value; None where it is as it should be."""
    if key in COUNTS or key in _NOT_NEGATIVE:
        least, most = (1, COUNTS[key]) if key in COUNTS else (0, _NOT_NEGATIVE[key])
        fits = type(value) is int and least <= value <= most
        return None if fits else f"an integer from {least} to {most:,}"
    if key in _NUMBERS:
        return _expected_number(key, value)
    for keys, kind, words in ((_TRUTHS, bool, "true or false"), (_TEXTS, str, "a string")):
        if key in keys:
            return None if type(value) is kind else words
    if key in _TABLES:
        return None if isinstance(value, Mapping) else "an object"
    if key in NESTED:
        return "null: a model of several parts is not known"
    if key == "architectures":
        names = isinstance(value, list) and value and all(isinstance(name, str) for name in value)
        return None if names else "a list with the name of the architecture"
    return _expected_of_layers(key, value, config) or _expected_token(key, value, config)


def _expected_number(key: str, value: Any) -> str | None:
    words = {"rms_norm_eps": "a float above 0 and below 1, such as 1e-06", "attention_dropout": "a number from 0 to 1"}
    fits = is_finite_number(value)
    if fits and key == "rms_norm_eps":
        fits = isinstance(value, float) and 0 < value < 1
    elif fits and key == "attention_dropout":
        fits = 0 <= value <= 1
    elif fits:
        fits = 0 < value < 1e30
    return None if fits else words.get(key, "a number above 0")


def _expected_of_layers(key: str, value: Any, config: Config) -> str | None:
    """Of keys that say something of single layers."""
    layers = config.get("num_hidden_layers")
    if key == "layer_types":
        full = isinstance(value, list) and all(kind == "full_attention" for kind in value)
        return None if full and len(value) == layers else f"'full_attention' for each of {layers} layers"
    if key == "mlp_only_layers":
        numbers = isinstance(value, list) and all(type(layer) is int and layer >= 0 for layer in value)
        return None if numbers else "a list of layer numbers"
    return None


def _expected_token(key: str, value: Any, config: Config) -> str | None:
    """Of special tokens, of which one may be -1 for none, and ends be several."""
    if key not in _TOKENS:
        return None
    size = config.get("vocab_size")
    tokens = value if isinstance(value, list) and key == "eos_token_id" else [value]
    if not all(type(token) is int and token >= -1 for token in tokens):
        return "the id of a token"
    if type(size) is int and any(token >= size for token in tokens):
        return f"the id of a token, below vocab_size={size}"
    return None


def require_values(config: Config, **faithful: Any) -> None:
    """Refuse every key whose value is not the one that a family computes.

    Raises:
        UnsupportedModel: naming the first such key, its value and the only one that is valid.
    """
    for key, value in faithful.items():
        if config.get(key, value) != value:
            raise UnsupportedModel(f"{key}={config[key]!r}: only {value!r} is computed faithfully")


def require_counts(config: Config, *keys: str, least: int = 1) -> None:
    """Refuse a config that does not say these counts: what is left out means another number in each library.

    Raises:
        UnsupportedModel: with every such key.
    """
    wrong = [
        f"{key}: {repr(config[key]) if key in config else 'missing'}"
        for key in keys
        if type(config.get(key)) is not int or config[key] < least
    ]
    if wrong:
        raise UnsupportedModel(f"config.json needs whole numbers of {least} or more for {', '.join(wrong)}")
