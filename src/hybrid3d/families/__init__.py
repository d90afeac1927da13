"""Model families that hybrid3d supports, by the architecture in a checkpoint's `config.json`."""

from __future__ import annotations

from hybrid3d.families.family import (
    EXPERT,
    PEFT_PREFIX,
    VALUE_HEAD,
    Experts,
    Family,
    Latents,
    adapter_names,
    can_be_adapted,
    head_dim,
    is_adapted,
    is_expert,
    is_quantized,
    module_of,
    query_groups,
    with_value_head,
)
from hybrid3d.families.grouped_query import LLAMA, MIXTRAL, QWEN2, QWEN3, QWEN3_MOE
from hybrid3d.families.shared_experts import DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE
from hybrid3d.families.values import Config, UnsupportedModel, refuse_unsupported

FAMILIES = {
    family.architecture: family
    for family in (LLAMA, QWEN2, QWEN3, QWEN3_MOE, MIXTRAL, DEEPSEEK_V3, DEEPSEEK_V2, GLM4_MOE)
}


def family_of(config: Config) -> Family:
    """Return the family of a checkpoint, after checking that it supports the checkpoint's config.

    Raises:
        UnsupportedModel: no family has this architecture, or the family would not compute this config correctly.
    """
    refuse_unsupported(config)
    names = config.get("architectures") or ["(none)"]
    family = FAMILIES.get(names[0])
    if family is None:
        raise UnsupportedModel(
            f"architecture {names[0]!r} is not supported; the supported architectures are {', '.join(FAMILIES)}. "
            "hybrid3d/families/README.md describes how to add one"
        )
    family.check(config)
    family.rope(config)
    return family


__all__ = [
    "EXPERT",
    "PEFT_PREFIX",
    "VALUE_HEAD",
    "Config",
    "Experts",
    "Family",
    "Latents",
    "UnsupportedModel",
    "adapter_names",
    "can_be_adapted",
    "family_of",
    "head_dim",
    "is_adapted",
    "is_expert",
    "is_quantized",
    "module_of",
    "query_groups",
    "refuse_unsupported",
    "with_value_head",
]
