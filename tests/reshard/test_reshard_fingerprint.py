"""Fingerprints of boxes add up to that of the whole tensor, whatever the layout, and a flipped bit changes them."""

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid3d.replay import fingerprint as module
from hybrid3d.replay.fingerprint import fingerprint, fingerprint_pieces, whole_fingerprints
from hybrid3d.reshard.ends import PlainSource
from hybrid3d.reshard.plan.box import Box
from hybrid3d.reshard.plan.layout import Holdings, Piece, View, contiguous_stride

MODULUS = 2**64


def split_mix(index: int, dim: int) -> int:
    """Return the odd weight of an index, by Python's integers."""
    z = (index + 1 + (dim << 48)) * 0x9E3779B97F4A7C15 % MODULUS
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % MODULUS
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % MODULUS
    return (z ^ (z >> 31)) | 1


def number(values: torch.Tensor, box: Box) -> int:
    return int(fingerprint(values, box)) % MODULUS


def held(pieces: list[tuple[Piece, torch.Tensor]]) -> PlainSource:
    return PlainSource({p.name: tensor for p, tensor in pieces}, Holdings(tuple(p for p, _ in pieces)))


def place_of(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))


def test_generator_is_split_mix_64() -> None:
    """The first numbers from seed 0 in Vigna's reference implementation, made odd."""
    assert [split_mix(n, 0) for n in range(2)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4 | 1]


def test_fingerprint_is_the_sum_that_it_says() -> None:
    values = torch.randn(3, 4)
    expected = sum(
        struct.unpack("<i", struct.pack("<f", values[i, j]))[0] * split_mix(i + 5, 0) * split_mix(j + 2, 1)
        for i in range(3)
        for j in range(4)
    )
    assert number(values, Box((5, 2), (3, 4))) == expected % MODULUS


@settings(max_examples=100, deadline=None)
@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    limit=st.integers(1, 50),
    chunk=st.integers(1, 50),
)
def test_boxes_add_up(shape: tuple[int, ...], dtype: torch.dtype, limit: int, chunk: int) -> None:
    values, whole = torch.randn(shape).to(dtype), Box.full(shape)
    turned = values.transpose(0, -1).contiguous().transpose(0, -1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK", chunk)
        found = sum(number(turned[place_of(box)], box) for box in whole.split(limit)) % MODULUS
    assert found == number(values, whole)


@settings(max_examples=200, deadline=None)
@given(dtype=st.sampled_from([torch.float32, torch.bfloat16]), data=st.data())
def test_fingerprint_changes_with_any_flipped_bit(dtype: torch.dtype, data: st.DataObject) -> None:
    values = torch.randn(6, 7).to(dtype)
    before = number(values, Box.full((6, 7)))
    bits = values.view(module.INTEGERS[values.itemsize])
    place = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 6))
    bits[place] ^= 1 << data.draw(st.integers(0, 8 * values.itemsize - 2))
    assert number(values, Box.full((6, 7))) != before


def test_swapped_elements_change_it() -> None:
    values = torch.arange(12.0).reshape(3, 4)
    swapped = values[[1, 0, 2]]
    assert number(values, Box.full((3, 4))) != number(swapped, Box.full((3, 4)))


def piece(name: str, box: Box, stored: torch.Tensor) -> tuple[Piece, torch.Tensor]:
    return Piece(name, box, View(name, 0, contiguous_stride(box.size)), "float32"), stored


def test_ranks_add_up_and_replicas_count_once() -> None:
    values, bias = torch.randn(4, 6), torch.randn(5)
    ranks = []
    for low in (0, 2, 0):  # the last rank is a replica of the first, with other values
        box = Box((low, 0), (2, 6))
        pieces = [piece("w", box, values[low : low + 2].clone()), piece("b", Box.full((5,)), bias)]
        ranks.append(fingerprint_pieces(held(pieces * 2)))
    expected = {"w": number(values, Box.full((4, 6))), "b": number(bias, Box.full((5,)))}
    assert whole_fingerprints(ranks) == expected


def test_boxes_that_overlap_in_part_are_refused() -> None:
    ranks = [fingerprint_pieces(held([piece("w", box, torch.ones(4))])) for box in (Box((0,), (4,)), Box((2,), (4,)))]
    with pytest.raises(ValueError, match="w: ranks hold boxes that overlap"):
        whole_fingerprints(ranks)
