"""Model families that are known and not supported: what is missing in which engine, and here."""

from __future__ import annotations

from dataclasses import dataclass

from hybrid3d.families.values import Config, UnsupportedModel


@dataclass(frozen=True)
class Unsupported:
    """What is missing for a family.

    Attributes:
        family: its name.
        missing: what it lacks, by Megatron-Core, vLLM or hybrid3d.
        instead: supported models of similar sizes, with their architectures.
    """

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
    """Check that a config is of none of the families that are known and not supported.

    Raises:
        UnsupportedModel: with the family's name, what is missing, and supported models of similar sizes.
    """
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if not isinstance(name, str) or name not in UNSUPPORTED:
        return
    found = UNSUPPORTED[name]
    missing = "; ".join(f"in {where}: {what}" for where, what in found.missing.items())
    raise UnsupportedModel(f"{found.family} ({name}) is not supported. Missing {missing}. Supported: {found.instead}")
