"""The model families that hybrid3d knows, by the architecture that a checkpoint's `config.json` names."""

from __future__ import annotations

from hybrid3d.families.dense import LLAMA, QWEN2, QWEN3
from hybrid3d.families.family import Config, Family, Rope, Strip, UnsupportedModel, head_dim, query_groups, rope_of

FAMILIES = {family.architecture: family for family in (LLAMA, QWEN2, QWEN3)}


def family_of(config: Config) -> Family:
    """The family of a checkpoint.

    Raises:
        UnsupportedModel: no family has this architecture, or the family would not compute this config faithfully.
    """
    names = config.get("architectures") or ["(none)"]
    family = FAMILIES.get(names[0])
    if family is None:
        raise UnsupportedModel(
            f"architecture {names[0]!r} is not known; known are {', '.join(FAMILIES)}. "
            "A new one is a table in hybrid3d/families/"
        )
    family.check(config)
    rope_of(config)
    return family


__all__ = [
    "FAMILIES",
    "Config",
    "Family",
    "Rope",
    "Strip",
    "UnsupportedModel",
    "family_of",
    "head_dim",
    "query_groups",
    "rope_of",
]
