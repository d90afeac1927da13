"""FP8 with block scales: the arithmetic, and the pieces of a rank's weights in FP8.

A canonical tensor in FP8 (e4m3) has a second one beside it, its scales in float32: one for each block of 128 x 128
elements, by which the block's FP8 values are multiplied. The last blocks of a dim may be smaller.
"""

from __future__ import annotations

import torch

BLOCK = 128
DTYPE = "float8_e4m3fn"
SCALE_SUFFIX = "_scale_inv"  # as in DeepSeek-V3's checkpoints
LARGEST = 448.0  # of the dtype
SMALLEST_AMAX = 1e-4  # of a block, so that one of zeros has a scale: vLLM's `per_block_cast_to_fp8`


def dequantize(quantized: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return what FP8 values [m, n] and the scales of their blocks stand for."""
    rows, columns = quantized.shape
    spread = scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return (quantized.float() * spread).to(dtype)
