"""Which layers of a model can have low-rank adapters, and how PEFT names them."""

from __future__ import annotations

import re
from collections.abc import Sequence

PEFT_PREFIX = "base_model.model."
"""What PEFT puts before the names of a model's modules in the files of adapters."""

_IN_A_BLOCK = re.compile(r"\.layers\.\d+\.")
_ROUTER = ".mlp.gate.weight", ".block_sparse_moe.gate.weight"  # no linear layer of its own in either engine


def module_of(weight: str) -> str:
    """Return the last name of the layer with a canonical weight, such as `q_proj`."""
    return weight.removesuffix(".weight").rsplit(".", 1)[-1]


def can_be_adapted(weight: str, dims: int) -> bool:
    """Return whether a canonical tensor with so many dims is the weight of a linear layer in one of the blocks."""
    return (
        dims == 2 and weight.endswith(".weight") and not weight.endswith(_ROUTER) and bool(_IN_A_BLOCK.search(weight))
    )


def is_adapted(weight: str, dims: int, target_modules: Sequence[str] | None) -> bool:
    """Return whether a canonical tensor has an adapter; as in PEFT, by its last name. None selects all that can."""
    return can_be_adapted(weight, dims) and (target_modules is None or module_of(weight) in target_modules)


def adapter_names(weight: str) -> tuple[str, str]:
    """Return the names of the two matrices, A and B, of the adapter of a canonical tensor in PEFT's files."""
    module = PEFT_PREFIX + weight.removesuffix(".weight")
    return f"{module}.lora_A.weight", f"{module}.lora_B.weight"
