"""A checksum depends on the bytes of a tensor, and not on its strides or its address."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid3d.reshard.move.verify import checksum

DTYPES = [torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.float64]
SHAPES = [(), (1,), (7,), (3, 5), (64, 256), (100, 384), (2, 3, 128), (31, 1000)]


def random(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return a tensor of random bytes."""
    raw = np.random.default_rng(seed).integers(0, 256, (*shape, dtype.itemsize), dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)


def in_gaps(tensor: torch.Tensor, gap: int) -> torch.Tensor:
    """Return a copy whose rows are `gap` elements apart, at an unaligned address."""
    *outer, inner = tensor.shape
    raw = torch.zeros((*outer, inner + gap, tensor.itemsize), dtype=torch.uint8)
    there = raw[..., 1 : inner + 1, :]
    there.copy_(tensor.contiguous().view(-1).view(torch.uint8).view(there.shape))
    return raw.view(tensor.dtype)[..., 1 : inner + 1, 0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if len(shape) > 1])
def test_checksum_does_not_depend_on_how_the_box_lies(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = random(shape, dtype)
    turned = tensor.transpose(0, -1).contiguous().transpose(0, -1)
    for gap in (1, 3, 64, 256):
        assert int(checksum(in_gaps(tensor, gap))) == int(checksum(tensor))
    assert int(checksum(turned)) == int(checksum(tensor))


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(SHAPES), st.sampled_from(DTYPES), st.data())
def test_checksum_changes_with_one_flipped_bit(shape: tuple[int, ...], dtype: torch.dtype, data: st.DataObject) -> None:
    tensor = random(shape, dtype)
    other = tensor.clone()
    raw = other.view(-1).as_strided((other.numel(),), (1,)).view(torch.uint8)
    raw[data.draw(st.integers(0, raw.numel() - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert int(checksum(other)) != int(checksum(tensor))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_change_places_change_it(dtype: torch.dtype) -> None:
    tensor = random((8, 512), dtype)
    assert int(checksum(tensor.flip(0))) != int(checksum(tensor))
    assert int(checksum(tensor[[1, 0, *range(2, 8)]])) != int(checksum(tensor))


def test_checksum_matches_one_worked_out_by_hand() -> None:
    """Words 0 to 39: a block of 32 with weight 1, the other eight with weight 3."""
    words = torch.arange(40, dtype=torch.int64)
    assert int(checksum(words.view(torch.float64))) == sum(range(32)) + 3 * sum(range(32, 40))
