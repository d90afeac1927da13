"""Stands in for what is compiled for GPUs in the processing after loading.

FlashInfer and DeepGEMM lay scales out: they only move them, or pack their exponents. Latent attention has its weights
dequantized by the kernel that computes them. What is tested is that a sync leaves what vLLM's loading leaves, with
these functions on both sides.
"""

from __future__ import annotations

import sys
from typing import Any

MXFP8_BLOCK = 32


def install(capability: tuple[int, int]) -> None:
    """Replace the functions; call it once vLLM's platform is faked."""
    sys.modules["deep_gemm"] = None  # type: ignore[assignment]  # as vLLM's wheel has its own; not one of tests/
    import torch
    import vllm.third_party.deep_gemm  # noqa: F401  # its import defines the op
    from flashinfer.quantization import fp4_quantization
    from vllm.model_executor.layers.attention import mla_attention
    from vllm.utils import deep_gemm

    def transform(sf: Any, mn: int, k: int, recipe: Any, *_: Any, **more: Any) -> Any:
        return required_layout(sf, mn, recipe[1], capability)

    library = torch.library.Library("deep_gemm", "IMPL")
    library.impl("transform_sf_into_required_layout", transform, "CPU")
    KEPT.append(library)
    fp4_quantization.block_scale_interleave = interleave
    deep_gemm.per_block_cast_to_fp8 = deep_gemm.per_block_cast_to_fp8._torchdynamo_orig_callable  # compiles for seconds
    dequantize = mla_attention.get_and_maybe_dequant_weights
    mla_attention.get_and_maybe_dequant_weights = lambda layer, out_dtype: (
        mixed(layer, out_dtype) if layer.weight.itemsize == 1 else dequantize(layer, out_dtype)
    )


KEPT: list[Any] = []  # a library's functions live as long as it


def mixed(layer: Any, dtype: Any) -> Any:
    """Return numbers [outputs, inputs] that depend on every bit of a layer's weight and of its scales.

    They stand for what the layer's kernel computes of an identity matrix.
    """
    import torch

    name = "weight_scale_inv" if hasattr(layer, "weight_scale_inv") else "weight_scale"
    scales, weight = (t.data.contiguous().flatten().view(torch.uint8) for t in (getattr(layer, name), layer.weight))
    times = -(-weight.numel() // scales.numel())
    found = weight.int() * 256 + scales.int().repeat(times)[: weight.numel()]
    return found.view(-1, layer.input_size_per_partition).to(dtype)


def interleave(scales: Any) -> Any:
    """Return scales [experts, m, k] or [m, k] in tiles of 128 x 4, flat, as `block_scale_interleave` does."""
    import torch
    from vllm.model_executor.layers.quantization.utils.mxfp8_utils import swizzle_mxfp8_scale

    matrices = scales if scales.dim() == 3 else scales[None]
    return torch.cat([swizzle_mxfp8_scale(one, one.shape[0], one.shape[1] * MXFP8_BLOCK) for one in matrices])


def required_layout(scales: Any, rows: int, block_rows: int, capability: tuple[int, int]) -> Any:
    """Return scales [groups, m, k] in float32 as DeepGEMM's kernels read them (its `csrc/apis/layout.hpp`).

    Hopper reads those of blocks of 128 x 128 as they are. Blackwell reads the exponents of a row's scales, four of them
    packed in an integer, with the rows of a column beside each other and padded to 16 bytes.
    """
    import torch

    if capability[0] < 10:
        return scales
    spread = scales.index_select(-2, torch.arange(rows) // block_rows)
    exponents = (spread.contiguous().view(torch.int32) >> 23).to(torch.uint8)
    padded = torch.nn.functional.pad(exponents, (0, -exponents.shape[-1] % 4, 0, -rows % 4))
    packed = padded.view(torch.int32)  # [groups, padded rows, k / 4]
    return packed.transpose(-1, -2).contiguous().transpose(-1, -2)[..., :rows, :]
