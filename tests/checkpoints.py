"""Tiny checkpoints of every family that hybrid3d knows, written by transformers' own `save_pretrained`.

Small enough for four ranks on two cores, and made so that nothing in them is idle: wide weights, biases and norms that
are neither 0 nor 1, fewer KV heads than heads, a vocabulary that TP4 must pad, and for Llama a rope scaling whose every
constant differs from Llama 3.1's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

DENSE = ("qwen2", "llama", "qwen3")
LATENT = ("deepseek_v3", "kimi_k2", "moonlight", "deepseek_v2")
SPARSE = ("qwen3_moe", "mixtral", "glm4_moe", *LATENT)
FAMILIES = DENSE + SPARSE
# Families whose tests with engines are in make test-all only, but for those of these files: they differ from other
# families by little.
MORE = {
    "kimi_k2": ("test_kernels", "test_verify_families"),
    "moonlight": ("test_kernels", "test_verify_families"),
    "glm4_moe": ("test_kernels", "test_verify_families", "test_megatron"),
}
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


# What the configs of checkpoints with code of their own have, which is never run.
OWN_CODE: dict[str, dict[str, Any]] = {
    "kimi_k2": {
        "model_type": "kimi_k2",
        "auto_map": {
            "AutoConfig": "configuration_deepseek.DeepseekV3Config",
            "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
        },
    }
}
YARN = dict(
    rope_type="yarn",
    rope_theta=10000.0,
    factor=8.0,
    original_max_position_embeddings=ORIGINAL_POSITIONS,
    beta_fast=32,
    beta_slow=1,
    mscale=1.0,
    mscale_all_dim=1.0,
)
CALMER = {"initializer_range": 0.1}  # with wider weights these amplify rounding beyond what the tests allow
EXPERTS: dict[str, Any] = dict(num_experts_per_tok=2, moe_intermediate_size=64)
# vLLM's latent attention on CPU has one size: a latent of 512 and 64 rotated dims.
LATENTS: dict[str, Any] = dict(kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=32, v_head_dim=48)
DEEPSEEK: dict[str, Any] = dict(
    {key: value for key, value in SIZES.items() if key not in ("head_dim", "num_key_value_heads")},
    **EXPERTS,
    **LATENTS,
    n_routed_experts=8,
    first_k_dense_replace=1,
    num_key_value_heads=SIZES["num_attention_heads"],
    tie_word_embeddings=False,
)


# Sizes of which each shard is whole blocks of 128 x 128 at the TP of the tests of FP8
GROUPED_IN_BLOCKS = dict(hidden_size=256, intermediate_size=512, head_dim=128)
LATENT_IN_BLOCKS = dict(hidden_size=256, intermediate_size=512, qk_nope_head_dim=64, v_head_dim=64)
EXPERTS_IN_BLOCKS = dict(moe_intermediate_size=256)
IN_BLOCKS: dict[str, dict[str, int]] = {
    **dict.fromkeys((*DENSE, "mixtral"), GROUPED_IN_BLOCKS),
    **dict.fromkeys(("qwen3_moe", "glm4_moe"), GROUPED_IN_BLOCKS | EXPERTS_IN_BLOCKS),
    **dict.fromkeys(LATENT, LATENT_IN_BLOCKS | EXPERTS_IN_BLOCKS),
}
IN_BLOCKS["qwen2"] = GROUPED_IN_BLOCKS | dict(hidden_size=512)
for _family in ("deepseek_v3", "kimi_k2"):
    IN_BLOCKS[_family] = IN_BLOCKS[_family] | dict(q_lora_rank=128)


def make_config(family: str) -> PretrainedConfig:
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    make = {
        "qwen2": lambda: transformers.Qwen2Config(**SIZES, tie_word_embeddings=True),
        "llama": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=False, rope_parameters=LLAMA3_ROPE),
        "qwen3": lambda: transformers.Qwen3Config(**SIZES, tie_word_embeddings=False),
        "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
            **SIZES, **EXPERTS, num_experts=8, norm_topk_prob=True, mlp_only_layers=[1], tie_word_embeddings=False
        ),
        "mixtral": lambda: transformers.MixtralConfig(
            **(SIZES | CALMER),
            num_local_experts=8,
            num_experts_per_tok=2,
            sliding_window=None,
            tie_word_embeddings=False,
        ),
        "deepseek_v3": lambda: transformers.DeepseekV3Config(
            **(DEEPSEEK | CALMER),
            q_lora_rank=64,
            n_shared_experts=1,
            n_group=2,
            topk_group=1,
            topk_method="noaux_tc",
            scoring_func="sigmoid",
            rope_parameters=YARN,
        ),
        # DeepSeek-V3's architecture under another name, without groups; its two bounds of YaRN are the same
        "kimi_k2": lambda: transformers.DeepseekV3Config(
            **DEEPSEEK,
            q_lora_rank=64,
            n_shared_experts=1,
            n_group=1,
            topk_group=1,
            topk_method="noaux_tc",
            scoring_func="sigmoid",
            routed_scaling_factor=2.827,
            rope_parameters=YARN | {"rope_theta": 50000.0, "beta_fast": 1.0, "beta_slow": 1.0},
        ),
        # DeepSeek-V3's architecture without compressed queries, groups and scaling of positions
        "moonlight": lambda: transformers.DeepseekV3Config(
            **DEEPSEEK,
            q_lora_rank=None,
            n_shared_experts=2,
            n_group=1,
            topk_group=1,
            topk_method="noaux_tc",
            scoring_func="sigmoid",
            rope_parameters={"rope_type": "default", "rope_theta": 50000.0},
        ),
        "glm4_moe": lambda: transformers.Glm4MoeConfig(
            **SIZES,
            **EXPERTS,
            n_routed_experts=8,
            n_shared_experts=2,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
            routed_scaling_factor=2.5,
            attention_bias=True,
            use_qk_norm=True,
            tie_word_embeddings=False,
            rope_parameters={"rope_type": "default", "rope_theta": 50000.0},
        ),
        "deepseek_v2": lambda: transformers.DeepseekV2Config(
            **(DEEPSEEK | CALMER),
            n_group=1,
            topk_group=1,
            q_lora_rank=None,
            n_shared_experts=2,
            topk_method="greedy",
            rope_parameters=YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
        ),
    }
    if family not in make:
        raise ValueError(f"no tiny checkpoint of {family!r}; there are {', '.join(FAMILIES)}")
    config = make[family]()
    # vLLM gives DeepseekV3Config the type kimi_k2 once it has read such a config, and checkpoints are written by type
    type(config).model_type = next(kind for kind, name in CONFIG_MAPPING_NAMES.items() if name == type(config).__name__)
    return config


def make_checkpoint(folder: Path, family: str, seed: int, **changes: Any) -> Path:
    """Write `config.json` and float32 weights, the same for the same arguments; `folder` is returned.

    `changes` are keys of the config.
    """
    import torch
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = make_config(family)
        config.update(changes)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
        routers = [(name, bias) for name, bias in model.named_buffers() if name.endswith("e_score_correction_bias")]
        for _, tensor in [*sorted(model.named_parameters()), *sorted(routers)]:
            if tensor.dim() == 1:
                tensor.data += torch.randn(tensor.shape) * 0.1
    model.save_pretrained(folder)
    if family in OWN_CODE:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | published(family), indent=2))
    return Path(folder)


def published(family: str) -> dict[str, Any]:
    """Return what the config of a checkpoint with code of its own says otherwise than transformers writes it."""
    return OWN_CODE.get(family, {})


def skeleton_of(folder: str | Path) -> tuple[type[PreTrainedModel], PretrainedConfig]:
    """Return the class of the model that transformers makes of a config, by its architecture, and its config."""
    import transformers

    config = json.loads((Path(folder) / "config.json").read_text())
    kind = getattr(transformers, config["architectures"][0])
    read = {key: value for key, value in config.items() if key not in ("model_type", "auto_map")}
    return kind, kind.config_class.from_dict(read)


def model_of(folder: str | Path) -> PreTrainedModel:
    """Return the float32 model that transformers makes of a checkpoint, without the code of the checkpoint."""
    import torch

    kind, config = skeleton_of(folder)
    return kind.from_pretrained(folder, config=config, dtype=torch.float32)
