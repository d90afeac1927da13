"""Small checkpoints, written on the spot, whose weights are the same with every version of every package.

Sizes are those that kernels for GPUs support: head sizes of 64, and for latent attention DeepSeek's own 128 + 64 and
128 (others have no prefill backend on Hopper).
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from hybrid3d.families import Config
from hybrid3d.reshard.plan.layout import Shape
from hybrid3d.train.megatron.probe import expected_shapes

VOCABULARY = 512
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
SIZES: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
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


def write_config(folder: Path, config: Config) -> Path:
    """Write `config.json`; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n", encoding="utf-8")
    return folder


def write_checkpoint(folder: Path, config: Config, seed: int = 0) -> Path:
    """Write a checkpoint in float32, the same for the same arguments; return the folder.

    It asks Megatron for the shapes, so this process must not have a process group yet.
    """
    write_config(folder, config)
    tensors = {name: _values(name, shape, seed) for name, shape in expected_shapes(config).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _values(name: str, shape: Shape, seed: int) -> torch.Tensor:
    """Return a tensor's values: uniform, around 1 for norms and around 0 for all others."""
    numbers = split_mix(zlib.crc32(f"{name}/{seed}".encode()) << 32, int(np.prod(shape)))
    values = 0.1 * ((numbers >> np.uint64(40)).astype(np.float32) / 2**23 - 1)
    if len(shape) == 1 and "norm" in name:
        values += 1
    return torch.from_numpy(values.astype(np.float32).reshape(shape))


def split_mix(seed: int, count: int) -> np.ndarray:
    """Return the first numbers of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), uint64 [count]."""
    state = np.uint64(seed) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
