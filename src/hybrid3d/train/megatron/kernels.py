"""Which kernels are used in training: Transformer Engine's and Apex's on a GPU with them installed, else PyTorch's."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from megatron.core import optimizer
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.tensor_parallel import layers

from hybrid3d.patches import apply
from hybrid3d.train.megatron import patches
from hybrid3d.train.megatron.runtime import ON_CUDA

USE_TE = ON_CUDA and HAVE_TE
# Megatron's own linears (the output layer, or all without Transformer Engine) need a kernel of Apex for this; there is
# one setting for them and for those of Transformer Engine.
FUSE_GRADIENTS = ON_CUDA and layers._grad_accum_fusion_available

PACKAGES = {"transformer_engine": "Transformer Engine", "apex": "Apex", "torch": "torch"}


def in_use() -> str:
    """Return one line for the log: the packages of the layers, the optimizer and gradient sums, with versions."""
    device = "" if USE_TE else " (CUDA)" if ON_CUDA else " (CPU)"
    adam = optimizer.Adam  # Megatron's choice among the three
    parts = [
        f"training kernels: {_named('transformer_engine' if USE_TE else 'torch')}{device}",
        f"optimizer: {_named(adam.__module__.partition('.')[0])} {adam.__name__}",
    ]
    if FUSE_GRADIENTS:
        parts.append(f"weight gradients added up by {_named('apex')}")
    return "; ".join(parts)


def _named(package: str) -> str:
    """Return a package's name and, where it is known, its version."""
    try:
        return f"{PACKAGES[package]} {version(package)}"
    except PackageNotFoundError:
        return PACKAGES[package]


if not USE_TE:
    apply(patches.WITHOUT_TRANSFORMER_ENGINE)
if optimizer.USING_PYTORCH_OPTIMIZER:
    apply(patches.WITH_TORCH_ADAM)
