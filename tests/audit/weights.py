"""Weights as a sync sends them, made up from a seed: in bfloat16, in FP8 with scales of blocks, or in MXFP8."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any
from unittest import mock

PRECISIONS = ("bfloat16", "fp8", "mxfp8")
STD = 0.05
MXFP8_BLOCK, MXFP8_SUFFIX = 32, "_scale"  # one scale for so many elements of a row, beside the weight

Shapes = dict[str, tuple[int, ...]]


def shapes_in(precision: str, shapes: Shapes) -> Shapes:
    """Return the canonical tensors and their shapes in a precision, from those in bfloat16."""
    from hybrid3d.families import is_quantized
    from hybrid3d.reshard.fp8 import quantized_shapes

    if precision == "fp8":
        return quantized_shapes(shapes, is_quantized)
    found = dict(shapes)
    if precision == "mxfp8":
        quantized = [name for name in shapes if is_quantized(name)]
        found |= {f"{name}{MXFP8_SUFFIX}": (shapes[name][0], shapes[name][1] // MXFP8_BLOCK) for name in quantized}
    return found


def weights_in(
    precision: str, shapes: Mapping[str, tuple[int, ...]], seed: int, rounded: Collection[str] = ()
) -> dict[str, Any]:
    """Return weights of all tensors.

    Args:
        shapes: in bfloat16.
        rounded: the kinds of tensors in FP8 whose scales are powers of two.
    """
    import torch

    from hybrid3d.families import is_quantized

    generator, found = torch.Generator().manual_seed(seed), {}
    for name, shape in shapes.items():
        tensor = (torch.randn(shape, generator=generator) * STD).bfloat16()
        if precision == "bfloat16" or not is_quantized(name):
            found[name] = tensor
        elif precision == "fp8":
            found |= _in_blocks(name, tensor, name in rounded)
        else:
            found |= _in_rows(name, tensor)
    return found


def _in_blocks(name: str, tensor: Any, powers_of_two: bool) -> dict[str, Any]:
    import torch

    from hybrid3d.reshard.fp8 import BLOCK, SCALE_SUFFIX, quantize

    padded = torch.zeros([-(-n // BLOCK) * BLOCK for n in tensor.shape], dtype=tensor.dtype)
    padded[: tensor.shape[0], : tensor.shape[1]] = tensor
    blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, -1, BLOCK)
    values, scales = quantize(blocks, blocks.abs().amax((1, 3)), powers_of_two)
    return {name: values.view(padded.shape)[: tensor.shape[0], : tensor.shape[1]], f"{name}{SCALE_SUFFIX}": scales}


def _in_rows(name: str, tensor: Any) -> dict[str, Any]:
    from vllm.model_executor.layers.quantization.utils.mxfp8_utils import _mxfp8_e4m3_quantize_torch

    values, scales = _mxfp8_e4m3_quantize_torch(tensor)
    return {name: values, f"{name}{MXFP8_SUFFIX}": scales}


@contextlib.contextmanager
def vllm_in(precision: str, names: Collection[str]) -> Iterator[None]:
    """Have vLLM started as for a checkpoint in a precision; of MXFP8 hybrid3d's recipes know nothing.

    Args:
        names: of all canonical tensors.
    """
    if precision != "mxfp8":
        yield
        return
    from hybrid3d.reshard.plan.layout import ITEMSIZE
    from hybrid3d.rollout import engine

    def quantization(config: Any) -> dict[str, Any]:
        routers = (one for one in quantization_config(config)["modules_to_not_convert"] if f"{one}.weight" in names)
        return {"quant_method": "mxfp8", "ignored_layers": ["lm_head", *routers]}  # it ignores longer names, too

    quantization_config = engine.quantization_config
    with mock.patch.object(engine, "quantization_config", quantization), mock.patch.dict(ITEMSIZE, uint8=1):
        yield
