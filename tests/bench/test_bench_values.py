"""The weights of a benchmark, and the baseline that gathers changed elements, against numpy's indexing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from methods.gathered_delta import positions_inside

from hybrid3d.bench.values import SyntheticChanges, SyntheticWeights, fill
from hybrid3d.reshard.delta.runs import changed_positions
from hybrid3d.reshard.ends import NamedTensors
from hybrid3d.reshard.plan.box import Box
from hybrid3d.reshard.plan.layout import Holdings, Piece, View

pytestmark = pytest.mark.engines  # the benchmark imports them


@st.composite
def boxes_and_parts(draw: st.DrawFn) -> tuple[Box, Box]:
    dims = draw(st.integers(1, 3))
    start = [draw(st.integers(0, 4)) for _ in range(dims)]
    size = [draw(st.integers(1, 5)) for _ in range(dims)]
    low = [draw(st.integers(0, n - 1)) for n in size]
    inner = [draw(st.integers(1, n - at)) for n, at in zip(size, low, strict=True)]
    part = Box(tuple(a + b for a, b in zip(start, low, strict=True)), tuple(inner))
    return Box(tuple(start), tuple(size)), part


@given(boxes_and_parts(), st.integers(0, 99))
def test_positions_in_a_part_are_those_of_numpy(boxes: tuple[Box, Box], seed: int) -> None:
    box, part = boxes
    flags = np.random.default_rng(seed).random(box.size) < 0.5
    inside, found = positions_inside(torch.from_numpy(np.flatnonzero(flags)), box, part)
    spans = tuple(slice(a - b, a - b + n) for a, b, n in zip(part.start, box.start, part.size, strict=True))
    assert found.tolist() == np.flatnonzero(flags[spans]).tolist()
    assert int(inside.sum()) == len(found)


@pytest.mark.parametrize("fraction", [0.02, 0.5, 1.0])
def test_fraction_of_the_elements_changes_and_its_bits_are_set(fraction: float) -> None:
    """Two pieces of one local tensor, one of which is a strided view of it."""
    box = Box((0, 0), (256, 100))
    pieces = (
        Piece("a", box, View("local", 0, (300, 1)), "bfloat16"),
        Piece("b", Box((5, 7), (256, 200)), View("local", 100, (300, 1)), "bfloat16"),
    )
    before, after = ({"local": torch.zeros(256, 300, dtype=torch.bfloat16)} for _ in range(2))
    weights, holdings = SyntheticWeights(3, 4, fraction), Holdings(pieces)
    fill(holdings, NamedTensors(before), SyntheticWeights(3))
    fill(holdings, NamedTensors(after), weights)
    changes = SyntheticChanges.create(weights, holdings, after)
    differ = before["local"].view(torch.int16) != after["local"].view(torch.int16)
    assert changes.changed == pytest.approx(fraction * differ.numel(), rel=0.05)
    assert int(differ.sum()) == pytest.approx(changes.changed, rel=0.02)  # some new values equal the old ones
    for piece, columns in zip(pieces, (slice(0, 100), slice(100, 300)), strict=True):
        marked = np.zeros(piece.box.size, bool).reshape(-1)
        marked[changed_positions(changes.bits, piece).numpy()] = True
        unmarked = ~torch.from_numpy(marked).view(piece.box.size)
        assert not (differ[:, columns] & unmarked).any()
