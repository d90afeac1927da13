"""Tiny checkpoints of every family that hybrid3d knows, written by transformers' own `save_pretrained`.

Small enough for four ranks on two cores, and made so that nothing in them is idle: wide weights, biases and norms that
are neither 0 nor 1, fewer KV heads than heads, a vocabulary that TP4 must pad, and for Llama a rope scaling whose every
constant differs from Llama 3.1's.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

FAMILIES = ("qwen2", "llama", "qwen3")
VOCABULARY = 330
ORIGINAL_POSITIONS = 64  # of Llama's scaling: longer sequences are what it is for

SIZES: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=512,
    initializer_range=0.15,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    dtype="float32",
)
LLAMA3_ROPE = dict(
    rope_type="llama3",
    rope_theta=50000.0,
    factor=8.0,
    low_freq_factor=1.25,
    high_freq_factor=3.0,
    original_max_position_embeddings=ORIGINAL_POSITIONS,
)


def make_config(family: str) -> PretrainedConfig:
    from transformers import LlamaConfig, Qwen2Config, Qwen3Config

    if family == "qwen2":
        return Qwen2Config(**SIZES, tie_word_embeddings=True)
    if family == "llama":
        return LlamaConfig(**SIZES, tie_word_embeddings=False, rope_parameters=LLAMA3_ROPE)
    if family == "qwen3":
        return Qwen3Config(**SIZES, tie_word_embeddings=False)
    raise ValueError(f"no tiny checkpoint of {family!r}; there are {', '.join(FAMILIES)}")


def make_checkpoint(folder: Path, family: str, seed: int) -> Path:
    """Write `config.json` and float32 weights, the same for the same family and seed; `folder` is returned."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(make_config(family))
        for _, parameter in sorted(model.named_parameters()):
            if parameter.dim() == 1:
                parameter.data += torch.randn(parameter.shape) * 0.1
    model.save_pretrained(folder)
    return Path(folder)
