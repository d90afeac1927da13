"""Whose kernels train: on a GPU Transformer Engine's and Apex's, where they are installed; else PyTorch's."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from megatron.core import optimizer
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.tensor_parallel import layers

from hybrid3d.patches import apply
from hybrid3d.train import patches
from hybrid3d.train.runtime import ON_CUDA

USE_TE = ON_CUDA and HAVE_TE
# Megatron's own linears (the output layer, or all without Transformer Engine) have a kernel of Apex's for this, and it
# is one setting for them and for Transformer Engine's.
FUSE_GRADIENTS = ON_CUDA and layers._grad_accum_fusion_available

PACKAGES = {"transformer_engine": "Transformer Engine", "apex": "Apex", "torch": "torch"}


def in_use() -> str:
    """One line for the log: what computes the layers, updates the weights and adds up gradients, with versions."""
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
    """A package's name and version, where it says one."""
    try:
        return f"{PACKAGES[package]} {version(package)}"
    except PackageNotFoundError:
        return PACKAGES[package]


if not USE_TE:
    apply(patches.WITHOUT_TRANSFORMER_ENGINE)
if optimizer.USING_PYTORCH_OPTIMIZER:
    apply(patches.WITH_TORCH_ADAM)
