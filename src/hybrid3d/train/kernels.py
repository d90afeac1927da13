"""Whose kernels train: on a GPU Transformer Engine's and Apex's, where they are installed; else PyTorch's."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from megatron.core import optimizer
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import layers
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe import moe_utils

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


def _do_without_te() -> None:
    """Megatron imports stand-ins where there is no Transformer Engine, and then takes two of them for it."""
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # the router asks whether it is None
    multi_latent_attention.HAVE_TE = False  # isinstance() of a stand-in raises


def _keep_adam_steps() -> None:
    """Torch's Adam counts its steps in a tensor per parameter, which Megatron saves and loads apart, then misses."""
    set_states = DistributedOptimizer._set_main_param_and_optimizer_states

    def set_states_but_steps(self: Any, model_param: Any, tensors: dict[str, torch.Tensor]) -> None:
        group, place = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][place]]
        set_states(self, model_param, {"step": state["step"], **tensors} if "step" in state else tensors)

    DistributedOptimizer._set_main_param_and_optimizer_states = set_states_but_steps


if not USE_TE:
    _do_without_te()
if optimizer.USING_PYTORCH_OPTIMIZER:
    _keep_adam_steps()
