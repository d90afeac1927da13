"""Tiny models of the families of real ones, whose weights are the same with every version of every package."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from hybrid3d.families import Config, family_of
from hybrid3d.reshard.plan.layout import Shape

HEAD_DIM = 64  # kernels for GPUs support it
MAX_GROUPS = 4  # of query heads; as many ranks of TP can share them
# The most of each size that a tiny model has; what is larger is lowered, and all else is as in the real model.
MAX_SIZES = {
    "vocab_size": 512,
    "num_local_experts": 8,
    "num_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 128,
}
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def shrunk(config: Config, layers: int) -> dict[str, Any]:
    """Return the config of a tiny model of the same family, with at least so many layers, some of each kind."""
    family = family_of(config)
    kinds = family.representative_layers(config)
    count = min(config["num_hidden_layers"], max(layers, 2, max(kinds) + 1))
    found = {**config, "num_hidden_layers": count}
    found |= {key: min(config[key], most) for key, most in MAX_SIZES.items() if isinstance(config.get(key), int)}
    heads, groups = config["num_attention_heads"], config.get("num_key_value_heads") or config["num_attention_heads"]
    if family.latents(config) is None:
        small = min(groups, MAX_GROUPS)
        heads = heads // groups * small
        found |= {"num_attention_heads": heads, "num_key_value_heads": small}
        found["hidden_size"] = min(config["hidden_size"], heads * HEAD_DIM)
        if config.get("head_dim") is not None:  # the heads then need not fill the hidden size
            found["head_dim"] = min(config["head_dim"], HEAD_DIM)
            found["hidden_size"] = min(found["hidden_size"], MAX_GROUPS * HEAD_DIM)
    else:  # the sizes of its latents are those that kernels have
        found |= {"num_attention_heads": min(heads, MAX_GROUPS), "num_key_value_heads": min(groups, MAX_GROUPS)}
        found["hidden_size"] = min(config["hidden_size"], MAX_GROUPS * HEAD_DIM)
    found["intermediate_size"] = min(config["intermediate_size"], 2 * found["hidden_size"])
    if isinstance(config.get("layer_types"), list):
        found["layer_types"] = config["layer_types"][:count]
    if config.get("max_window_layers") is not None:
        found["max_window_layers"] = min(config["max_window_layers"], count)
    if config.get("mlp_only_layers"):
        found["mlp_only_layers"] = [layer for layer in config["mlp_only_layers"] if layer < count]
    if config.get("num_nextn_predict_layers"):
        found["num_nextn_predict_layers"] = 0
    found |= dict.fromkeys((key for key in TOKENS if config.get(key) is not None), 0)
    found.pop("quantization_config", None)
    return found


def write_config(folder: Path, config: Config) -> Path:
    """Write `config.json`; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n", encoding="utf-8")
    return folder


def write_checkpoint(folder: Path, config: Config, seed: int = 0) -> Path:
    """Write a checkpoint in float32, the same for the same arguments; return the folder.

    It asks Megatron for the shapes, so this process must not have a process group yet.
    """
    from hybrid3d.train.megatron.probe import expected_shapes

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
