"""The version of Megatron-Core that this package is written for, and the attributes that it sets in its objects."""

from __future__ import annotations

from typing import Any

from hybrid3d.patches import set_existing

MEGATRON = "megatron-core==0.16.1"


def set_in_megatron(owner: Any, **values: Any) -> None:
    """Set attributes that an object of Megatron-Core has.

    Raises:
        MissingTarget: it has no such attribute, as in another version, which would not read it.
    """
    set_existing(MEGATRON, owner, **values)
