"""Versions, and a self-test of cuDNN: a convolution and attention against the CPU in float64."""

from __future__ import annotations

import platform
import re
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpu.record import Record

OLDEST_PYTHON, OLDEST_TORCH = (3, 11), (2, 11)
TOLERANCE = 2e-2  # relative, of sums of bfloat16 products


def versions(record: Record, device: str) -> None:
    """Check that Python and torch are new enough, and that torch was built for the device."""
    python, pytorch = platform.python_version(), torch.__version__
    record(python=python, torch=pytorch, cuda=torch.version.cuda, threads=torch.get_num_threads())
    if device == "cuda":
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        record(gpu=torch.cuda.get_device_name(), cudnn=torch.backends.cudnn.version(), nccl=nccl)
        record(bf16=torch.cuda.is_bf16_supported(including_emulation=False))
        assert torch.cuda.is_bf16_supported(including_emulation=False), (
            "the GPU has no bfloat16: needs an A100 or newer"
        )
    assert _numbers(python) >= OLDEST_PYTHON, f"Python {python}: expected 3.11 or newer"
    assert _numbers(pytorch) >= OLDEST_TORCH, f"torch {pytorch}: expected 2.11 or newer"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def cudnn(record: Record, device: str) -> None:
    """Run a convolution and attention, forward and backward; on a GPU through cuDNN, whose libraries are listed.

    Libraries of two versions of cuDNN in one process end in CUDNN_STATUS_SUBLIBRARY_VERSION_MISMATCH.
    """
    torch.manual_seed(1)
    images, kernels = torch.randn(4, 16, 32, 32), torch.randn(32, 16, 3, 3)
    if device == "cuda":
        assert torch.backends.cudnn.is_acceptable(images.cuda()), "torch does not find cuDNN"
    record(convolution_error=_error(torch.nn.functional.conv2d, [images, kernels], device))
    query, key, value = (torch.randn(2, 4, 128, 64) for _ in range(3))
    backend = SDPBackend.CUDNN_ATTENTION if device == "cuda" else SDPBackend.MATH

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend if q.device.type == device else SDPBackend.MATH):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    record(attention_error=_error(attention, [query, key, value], device))
    mapped = {
        line.split()[-1]
        for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
        if "libcudnn" in line
    }
    folders = sorted({str(Path(path).parent) for path in mapped})
    record(cudnn_libraries=len(mapped), cudnn_folders=folders)
    assert len(folders) <= 1, f"cuDNN's libraries come from {len(folders)} folders: {', '.join(folders)}; expected one"


def _error(function: Callable[..., torch.Tensor], inputs: list[torch.Tensor], device: str) -> float:
    """Return the largest error of a function's result and gradients in bfloat16, relative to the largest value.

    Raises:
        AssertionError: it is above `TOLERANCE`.
    """
    rounded = [x.bfloat16() for x in inputs]
    exact = _results(function, [x.double() for x in rounded])
    found = _results(function, [x.to(device) for x in rounded])
    pairs = zip(found, exact, strict=True)
    error = max(float((one.cpu().double() - other).abs().max() / other.abs().max()) for one, other in pairs)
    assert error < TOLERANCE, f"largest relative error {error:.2e}, expected less than {TOLERANCE:.0e}"
    return error


def _results(function: Callable[..., torch.Tensor], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    result = function(*leaves)
    return [result, *torch.autograd.grad(result.square().mean(), leaves)]
