"""What differs between versions of Megatron-Core, by feature: other modules ask here, and not for a number."""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from inspect import signature
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import serialization
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec

from hybrid3d.patches import set_existing

MEGATRON = "megatron-core>=0.16.1,<0.20"  # the versions that this package is written for

# Files of a checkpoint are written by Megatron's functions, and not by the package that is the default since 0.17
_CHOOSES_WRITER = "async_strategy" in signature(dist_checkpointing.save).parameters
SAVE_SETTINGS: dict[str, Any] = {"async_sharded_save": True} | ({"async_strategy": "mcore"} if _CHOOSES_WRITER else {})

WRITTEN_BY = {"megatron-core": version("megatron-core")}  # in a checkpoint's manifest

# The file of a checkpoint without which this version cannot load it; since 0.19 the other files have its content
COMMON_FILE = "" if hasattr(serialization, "_legacy_common_state_exists") else "common.pt"

# The attribute of a layer for multi-token prediction that is its decoder layer: renamed in 0.17
_MTP_PARTS = {field.name for field in fields(MultiTokenPredictionLayerSubmodules)}
MTP_DECODER_LAYER = "mtp_model_layer" if "mtp_model_layer" in _MTP_PARTS else "transformer_layer"

# The arguments of such a layer's full recomputation: until 0.17 a function, since 0.19 also the mask of padding
MTP_RECOMPUTATION = frozenset(signature(MultiTokenPredictionLayer._checkpointed_forward).parameters)

# Whether it decides itself which norms of latent attention are one layer with the linear layer after them: since 0.19
CHOOSES_LATENT_NORMS = find_spec("megatron.core.transformer.mla_qk_norm_config") is not None


def submodules_of(spec: Any) -> Any:
    """Return the submodules of a part of a layer's spec, which may be a partial function since 0.18; None without."""
    if isinstance(spec, partial):
        return spec.keywords.get("submodules")
    return spec.submodules if isinstance(spec, ModuleSpec) else None


def set_in_megatron(owner: Any, **values: Any) -> None:
    """Set attributes that an object of Megatron-Core has; MissingTarget if a version lacks it and would not read it."""
    set_existing(MEGATRON, owner, **values)
