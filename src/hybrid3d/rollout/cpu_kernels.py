"""Kernels for CPUs, in torch, in place of those of vLLM that pack weights or that the machine cannot run.

vLLM's CPU kernels of weights in FP8 need AMX. On other x86 CPUs layers are dequantized to the dtype of the activations
each time that they compute. All of this is slow, but what tests and demonstrations of a tiny model need.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUExpertsFp8, CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
from vllm.platforms import PlatformEnum, current_platform

from hybrid3d.reshard.fp8 import dequantize


class DequantizingLinear(Fp8BlockScaledMMLinearKernel):
    """Dequantizes a linear layer's weights each time that it computes."""

    apply_input_quant = False

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Keep the weights as they are loaded."""

    def apply_weights(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None, **_: Any
    ) -> torch.Tensor:
        found = self._get_layer_params(layer)
        return torch.nn.functional.linear(x, dequantize(found.weight, found.block_scale, x.dtype), bias)

    def apply_block_scaled_mm(self, A: Any, B: Any, As: Any, Bs: Any) -> torch.Tensor:
        raise NotImplementedError("`apply_weights` computes the layer")


class _OneByOne:
    """Computes one expert after another, of those that have tokens; with SiLU and without biases."""

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        return bool(activation == MoEActivation.SILU)

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        *_: Any,
        **__: Any,
    ) -> None:
        """Write into `output` [tokens, hidden] the weighted sums of what the chosen experts compute."""
        output.zero_()
        for expert in topk_ids.unique().tolist():
            tokens, choice = (topk_ids == expert).nonzero(as_tuple=True)
            fc1, fc2 = self._weights_of(w1, w2, expert, output.dtype)
            gate, up = torch.nn.functional.linear(hidden_states[tokens], fc1).chunk(2, -1)
            computed = torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, fc2)
            output.index_add_(0, tokens, (computed * topk_weights[tokens, choice, None]).to(output.dtype))

    def _weights_of(
        self, w1: torch.Tensor, w2: torch.Tensor, expert: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return w1[expert], w2[expert]


class PlainExperts(_OneByOne, CPUUnquantizedExperts):
    """Computes experts from weights that stay as they are loaded."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Keep the weights as they are loaded."""


class DequantizingExperts(_OneByOne, CPUExpertsFp8):
    """Dequantizes the weights of each expert that has tokens, each time that a layer computes."""

    @staticmethod
    def _supports_current_device() -> bool:
        return bool(current_platform.is_cpu())

    def _weights_of(
        self, w1: torch.Tensor, w2: torch.Tensor, expert: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        fc1 = dequantize(w1[expert], self.w1_scale[expert], dtype)
        return fc1, dequantize(w2[expert], self.w2_scale[expert], dtype)


def use_torch(layer: Any, remove_weight: bool) -> None:
    """Replace `dispatch_cpu_unquantized_gemm`: a linear layer's weights stay as they are loaded."""
    layer.cpu_linear = torch.nn.functional.linear


def with_dequantizing_linear(kernels: dict[PlatformEnum, list[Any]]) -> dict[PlatformEnum, list[Any]]:
    """Return vLLM's kernels of block scales by platform, with one more for CPUs, which it selects last."""
    return {**kernels, PlatformEnum.CPU: [*kernels[PlatformEnum.CPU], DequantizingLinear]}


def with_dequantizing_experts(classes_of: Callable[[Fp8MoeBackend], list[Any]]) -> Callable[[Fp8MoeBackend], list[Any]]:
    """Return a `backend_to_kernel_cls` that has one more class for CPUs, which vLLM selects last."""

    def backend_to_kernel_cls(backend: Fp8MoeBackend) -> list[Any]:
        return [*classes_of(backend), *([DequantizingExperts] if backend == Fp8MoeBackend.CPU else [])]

    return backend_to_kernel_cls


def pack_for_kernels(pack: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `prepare_fp8_moe_layer_for_cpu` that packs experts only for vLLM's kernels, if the machine has AMX."""
    return pack if torch.cpu._is_amx_tile_supported() else lambda w13, w2: (w13, w2)
