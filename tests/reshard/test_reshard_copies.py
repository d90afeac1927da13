"""Merged copies do what the copies do one by one, and those of equal boxes at equal distances are one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid3d.reshard.move.memory import BatchedCopies, merge_copies, widen

Views = list[tuple[torch.Tensor, torch.Tensor]]


def experts(count: int, rows: int, columns: int, part: slice, of: torch.Tensor, to: torch.Tensor) -> Views:
    """Copy a slice of the columns of each expert's matrix from one buffer to another."""
    source, target = of.view(count, rows, columns), to.view(count, rows, -1)
    return [(target[i], source[i, :, part]) for i in range(count)]


def test_equal_slices_of_experts_are_one_copy() -> None:
    source, target = torch.randn(32 * 6 * 8), torch.zeros(32 * 6 * 4)
    copies = experts(32, 6, 8, slice(4, 8), source, target)
    (merged,) = merge_copies(copies)
    assert merged[0].shape == (32, 6, 4)
    merged[0].copy_(merged[1])
    assert target.view(32, 6, 4).equal(source.view(32, 6, 8)[:, :, 4:])


def test_slices_that_lie_between_each_other_are_one_copy() -> None:
    source, target = torch.randn(4, 5, 3), torch.zeros(5, 12)
    copies = BatchedCopies()
    for i in range(4):
        copies.add(target[:, 3 * i : 3 * i + 3], source[i])
    assert len(copies) == 1
    copies.run()
    assert target.equal(torch.cat(list(source), 1))


@pytest.mark.parametrize("gap", [1, 2, 5])
def test_gap_ends_a_merged_copy(gap: int) -> None:
    source, target = torch.randn(10, 4), torch.zeros(10, 4)
    rows = [i for i in range(10) if i != gap]
    merged = list(merge_copies([(target[i], source[i]) for i in rows]))
    assert sum(1 if t.dim() == 1 else len(t) for t, _ in merged) == len(rows)
    assert len(merged) <= 3
    for t, s in merged:
        t.copy_(s)
    expected = source.clone()
    expected[gap] = 0
    assert target.equal(expected)


@given(st.data())
def test_merged_copies_do_what_they_do_one_by_one(data: st.DataObject) -> None:
    """Disjoint boxes of one target, each from anywhere in one of two sources, in two dtypes."""
    rows, columns = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 8))
    target = torch.zeros(rows, columns)
    sources = [torch.randn(20, 20), torch.randn(20, 20).to(torch.bfloat16)]
    height, width = data.draw(st.integers(1, rows)), data.draw(st.integers(1, columns))
    copies, expected = BatchedCopies(), np.zeros((rows, columns), np.float32)
    for top in range(0, rows - height + 1, height):
        for left in range(0, columns - width + 1, width):
            source = sources[data.draw(st.integers(0, 1))]
            row, column = data.draw(st.integers(0, 20 - height)), data.draw(st.integers(0, 20 - width))
            if data.draw(st.booleans()):
                box = source[row : row + height, column : column + width]
                copies.add(target[top : top + height, left : left + width], box)
                expected[top : top + height, left : left + width] = box.float().numpy()
    copies.run()
    assert np.array_equal(target.numpy(), expected)


@pytest.mark.parametrize(
    ("dtype", "columns", "first", "elements"),
    [
        (torch.bfloat16, 64, 8, torch.complex128),
        (torch.bfloat16, 64, 4, torch.int64),
        (torch.bfloat16, 62, 8, torch.int32),  # rows of 124 bytes
        (torch.bfloat16, 64, 3, torch.bfloat16),  # begins at an odd element
        (torch.float8_e4m3fn, 64, 16, torch.complex128),
        (torch.float8_e4m3fn, 64, 3, torch.float8_e4m3fn),
        (torch.float32, 64, 4, torch.complex128),
        (torch.float32, 63, 4, torch.float32),
    ],
)
def test_copy_with_gaps_is_one_of_wider_elements(
    dtype: torch.dtype, columns: int, first: int, elements: torch.dtype
) -> None:
    """On a GPU these kernels move an element at a time; here the same views are copied on a CPU."""
    size = dtype.itemsize
    source = torch.randint(0, 256, (6, columns * size), dtype=torch.uint8).view(dtype)
    target = torch.zeros(6, columns * size, dtype=torch.uint8).view(dtype)
    part = slice(first, first + 16)
    wide_target, wide_source = widen(target[1:, part], source[1:, part])
    assert wide_source.dtype == wide_target.dtype == elements
    wide_target.copy_(wide_source)
    expected = torch.zeros_like(target.view(torch.uint8))
    expected[1:, first * size : (first + 16) * size] = source.view(torch.uint8)[1:, first * size : (first + 16) * size]
    assert target.view(torch.uint8).equal(expected)


def test_copies_to_another_dtype_keep_their_elements() -> None:
    target, source = torch.zeros(4, 8), torch.zeros(4, 8, dtype=torch.bfloat16)
    assert widen(target[:, :4], source[:, :4])[0].dtype == torch.float32
