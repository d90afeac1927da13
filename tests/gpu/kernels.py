"""Apex's extension that adds up weight gradients in float32."""

from __future__ import annotations

import importlib

import torch

from gpu.record import Record
from hybrid3d.train.megatron.runtime import FUSE_GRADIENTS, in_use


def apex_gradients(record: Record, device: str) -> None:
    """Add a bfloat16 weight gradient to a float32 buffer by Apex's kernel, and compare with torch."""
    extension = importlib.import_module("fused_weight_gradient_mlp_cuda")
    torch.manual_seed(1)
    inputs = torch.randn(512, 256, device=device).bfloat16()
    gradients = torch.randn(512, 384, device=device).bfloat16()
    total = torch.randn(384, 256, device=device)
    expected = total + gradients.float().T @ inputs.float()
    extension.wgrad_gemm_accum_fp32(inputs, gradients, total)
    error = float((total - expected).abs().max() / expected.abs().max())
    record(kernels=in_use(), error=error)
    assert error < 1e-4, f"relative error {error:.2e}, expected less than 1e-4"
    assert FUSE_GRADIENTS, "Apex's extension is there, and training does not use it"
