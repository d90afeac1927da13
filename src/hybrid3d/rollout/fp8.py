"""The settings of vLLM's weights in FP8 with block scales, and which of them it quantizes anew."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from hybrid3d.families import Config, family_of
from hybrid3d.reshard.fp8 import BLOCK


def quantization_config(config: Config) -> dict[str, Any]:
    """Return the `quantization_config` of a checkpoint that has what a sync sends of a model with this config."""
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": ["lm_head", *family_of(config).routers(config)],
    }


def names_of(weights: Iterable[torch.Tensor], model: torch.nn.Module) -> frozenset[str]:
    """Return the names of the parameters of a model that have these weights' memory.

    Raises:
        RuntimeError: some weights are in other memory, so that a sync would not know what vLLM does with them.
    """
    addresses = {weight.data_ptr() for weight in weights}
    found = {name: parameter for name, parameter in model.named_parameters() if parameter.data_ptr() in addresses}
    if missing := len(addresses) - len({parameter.data_ptr() for parameter in found.values()}):
        raise RuntimeError(
            f"vLLM quantized {len(addresses)} weights anew, and {missing} are no parameters of its model"
        )
    return frozenset(found)
