"""FP8 with block scales: the bits are those of vLLM's function, and split blocks get the scale of the whole block."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybrid3d.families import is_quantized
from hybrid3d.reshard.delta.encoding import unpack_bits
from hybrid3d.reshard.ends import PlainSource
from hybrid3d.reshard.fp8 import (
    BLOCK,
    SCALE_SUFFIX,
    dequantize,
    quantized_holdings,
    quantized_shapes,
)
from hybrid3d.reshard.plan.box import Box
from hybrid3d.reshard.plan.layout import Holdings, Piece, View
from hybrid3d.reshard.quantized import Quantized
from quantizing import quantize_together

NAME = "model.layers.3.mlp.down_proj.weight"
CASES = [((512, 256), 0.02), ((576, 200), 1.0), ((300, 1000), 3e-6), ((256, 256), 0.0)]


def weight(shape: tuple[int, int], scale: float = 0.1, seed: int = 0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16()


def parts_of(whole: torch.Tensor, boxes: list[Box]) -> Quantized:
    """A rank that holds these boxes of a tensor, each in memory of its own."""
    tensors, pieces = {}, []
    for number, box in enumerate(boxes):
        own = whole[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))].contiguous()
        tensors[f"part{number}"] = own
        pieces.append(Piece(NAME, box, View(f"part{number}", 0, own.stride()), "bfloat16"))
    return Quantized(PlainSource(tensors, Holdings(tuple(pieces))), is_quantized, "cpu", keep=False)


def whole_of(ranks: list[Quantized], shape: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The FP8 values and the scales that ranks have together; each element once."""
    scales_shape = quantized_shapes({NAME: shape}, is_quantized)[f"{NAME}{SCALE_SUFFIX}"]
    found = {NAME: torch.zeros(shape), f"{NAME}{SCALE_SUFFIX}": torch.zeros(scales_shape)}
    times = {name: torch.zeros(tensor.shape) for name, tensor in found.items()}
    for rank in ranks:
        for piece in rank.holdings.pieces:
            here = tuple(slice(a, b) for a, b in zip(piece.box.start, piece.box.stop, strict=True))
            found[piece.name][here] = rank.read(piece).float()
            times[piece.name][here] += 1
    assert all(bool((count == 1).all()) for count in times.values())
    return found[NAME], found[f"{NAME}{SCALE_SUFFIX}"]


@pytest.mark.engines
@pytest.mark.parametrize(("shape", "scale"), CASES)
def test_bits_are_those_of_vllm(shape: tuple[int, int], scale: float) -> None:
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    whole = weight(shape, scale)
    rank = parts_of(whole, [Box.full(shape)])
    assert quantize_together([rank]) == 0
    values, scales = per_block_cast_to_fp8._torchdynamo_orig_callable(whole, [BLOCK, BLOCK])
    found = whole_of([rank], shape)
    assert torch.equal(found[0], values.float())
    assert torch.equal(found[1], scales)


@pytest.mark.engines
@pytest.mark.slow
def test_bits_are_those_of_vllm_compiled() -> None:
    """vLLM compiles its function, which takes seconds."""
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    for shape, scale in CASES:
        rank = parts_of(weight(shape, scale), [Box.full(shape)])
        quantize_together([rank])
        values, scales = per_block_cast_to_fp8(weight(shape, scale), [BLOCK, BLOCK])
        found = whole_of([rank], shape)
        assert torch.equal(found[0], values.float())
        assert torch.equal(found[1], scales)


def test_transformers_rounds_scales_to_a_neighbor() -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    whole = weight((512, 1024))
    settings: Any = SimpleNamespace(weight_block_size=(BLOCK, BLOCK), scale_fmt="float")
    theirs = Fp8Quantize(SimpleNamespace(quantization_config=settings)).convert({NAME: whole})
    rank = parts_of(whole, [Box.full((512, 1024))])
    quantize_together([rank])
    values, scales = whole_of([rank], (512, 1024))
    units = (scales.view(torch.int32) - theirs[NAME + SCALE_SUFFIX].view(torch.int32)).abs()
    assert int(units.max()) <= 2
    assert float((values != theirs[NAME].float()).float().mean()) < 5e-3  # where rounding to FP8 is a tie, or nearly
    dequantized = [dequantize(v, s, torch.float32) for v, s in ((values, scales), (theirs[NAME], scales))]
    assert torch.allclose(*dequantized, rtol=0.13, atol=1e-4)


@pytest.mark.parametrize(
    "boxes",
    [
        [Box((0, 0), (192, 320)), Box((192, 0), (192, 320)), Box((384, 0), (216, 320))],
        [Box((0, 0), (600, 160)), Box((0, 160), (600, 160))],
        [Box((0, 0), (64, 320)), Box((64, 0), (32, 320)), Box((96, 0), (504, 320))],
    ],
    ids=["rows", "columns", "a third within a block"],
)
def test_split_blocks_get_the_scale_of_the_whole(boxes: list[Box]) -> None:
    whole = weight((600, 320))
    one = parts_of(whole, [Box.full((600, 320))])
    quantize_together([one])
    ranks = [parts_of(whole, [box]) for box in boxes]
    assert quantize_together(ranks) > 0
    for found, expected in zip(whole_of(ranks, (600, 320)), whole_of([one], (600, 320)), strict=True):
        assert torch.equal(found, expected)


def test_pieces_of_rows_that_follow_are_one_region() -> None:
    """As the rows of keys are, which Megatron keeps group by group."""
    whole = weight((256, 128))
    rank = parts_of(whole, [Box((64 * i, 0), (64, 128)) for i in (2, 0, 3, 1)])
    assert quantize_together([rank]) == 0
    assert [piece.box for piece in rank.holdings.pieces] == [Box.full((256, 128)), Box.full((2, 1))]
    one = parts_of(whole, [Box.full((256, 128))])
    quantize_together([one])
    assert torch.equal(whole_of([rank], (256, 128))[0], whole_of([one], (256, 128))[0])


def test_quantized_holdings_leave_other_tensors_alone() -> None:
    names = [
        "model.embed_tokens.weight",
        "model.layers.0.mlp.gate.weight",
        "model.layers.0.self_attn.q_proj.bias",
        "lm_head.weight",
    ]
    pieces = tuple(Piece(name, Box.full((4, 4)), View(name, 0, (4, 1)), "bfloat16") for name in names)
    assert quantized_holdings(Holdings(pieces), is_quantized) == Holdings(pieces)


def test_changes_are_those_of_values_and_scales() -> None:
    own = weight((256, 256))
    held = Piece(NAME, Box.full((256, 256)), View("own", 0, (256, 1)), "bfloat16")
    rank = Quantized(PlainSource({"own": own}, Holdings((held,))), is_quantized, "cpu", keep=True)
    quantize_together([rank])
    rank.changes.clear()
    before = {piece.name: rank.read(piece).clone() for piece in rank.holdings.pieces}
    own[3, 5] *= 1.5
    own[200, 200] = 10.0  # the largest of its block, whose scale changes
    quantize_together([rank])
    for piece in rank.holdings.pieces:
        old, new = before[piece.name], rank.read(piece)
        differ = old.view(torch.uint8) != new.view(torch.uint8)
        differ = differ.view(*old.shape, old.itemsize).any(-1).flatten()
        assert torch.equal(unpack_bits(rank.changes.bitmaps()[piece.view.tensor])[: len(differ)], differ)
        assert differ.any()
    assert int(unpack_bits(rank.changes.bitmaps()[NAME])[: 128 * 256].sum()) == 1
