"""Lets vLLM take a CPU for a GPU on which it computes FP8 weights with DeepGEMM and scales that are powers of two.

Which layers DeepGEMM computes is decided by vLLM's own checks of their shapes, and what is made of their weights by its
own processing; only DeepGEMM itself, which is compiled for GPUs, is missing: layers are dequantized to compute, and
scales stay in the layout in which they are loaded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear.scaled_mm import deep_gemm as kernel
from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
from vllm.model_executor.layers.quantization import fp8 as fp8_layers
from vllm.model_executor.layers.quantization.utils import fp8_utils
from vllm.platforms import PlatformEnum
from vllm.utils import deep_gemm

from hybrid3d.rollout.cpu_kernels import DequantizingExperts, DequantizingLinear

compiled = deep_gemm.per_block_cast_to_fp8
cast_as_vllm_does = compiled._torchdynamo_orig_callable  # compiling it takes seconds


class DeepGemmLinear(kernel.DeepGemmFp8BlockScaledMMKernel):
    """vLLM's choice and processing for DeepGEMM, computed by dequantizing."""

    apply_weights = DequantizingLinear.apply_weights
    apply_input_quant = False

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Make vLLM choose so for models that are built and loaded within."""
    kernels = {**linear._POSSIBLE_FP8_BLOCK_KERNELS, PlatformEnum.CPU: [DeepGemmLinear, DequantizingLinear]}
    with contextlib.ExitStack() as patches:

        def replace(owner: Any, name: str, value: Any) -> None:
            patches.enter_context(mock.patch.object(owner, name, value))

        for module in (deep_gemm, kernel):
            replace(module, "is_deep_gemm_supported", lambda: True)
        for module in (deep_gemm, kernel, fp8_utils):
            replace(module, "is_deep_gemm_e8m0_used", lambda: True)
        replace(linear, "_POSSIBLE_FP8_BLOCK_KERNELS", kernels)
        replace(fp8_layers, "select_fp8_moe_backend", lambda **_: (Fp8MoeBackend.DEEPGEMM, DequantizingExperts))
        replace(fp8_utils, "transform_sf_into_required_layout", lambda sf, **_: sf)
        replace(deep_gemm, "per_block_cast_to_fp8", cast_as_vllm_does)
        yield


def is_power_of_two(scales: torch.Tensor) -> torch.Tensor:
    """Whether each scale has no mantissa, by its bits."""
    return scales.float().view(torch.int32) & 0x007FFFFF == 0
