"""Sources over sources: each gives the values of the one below it, changed as it says, and undoes what it has begun."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from hybrid3d.families import is_quantized
from hybrid3d.reshard.delta.runs import changed_positions
from hybrid3d.reshard.ends import NOTHING_TRACKED, NoSource, PlainSource
from hybrid3d.reshard.plan.box import Box
from hybrid3d.reshard.plan.layout import Holdings, Piece, View
from hybrid3d.reshard.quantized import Quantized
from hybrid3d.reshard.sources import Compared, Merged, Only

UP = "model.layers.0.mlp.up_proj.weight"
NORM = "model.norm.weight"


def whole(name: str, shape: tuple[int, ...]) -> Piece:
    stride = torch.empty(shape).stride()
    return Piece(name, Box.full(shape), View(name, 0, stride), "bfloat16")


def plain(tensors: dict[str, torch.Tensor]) -> PlainSource:
    pieces = tuple(whole(name, tuple(tensor.shape)) for name, tensor in tensors.items())
    return PlainSource(tensors, Holdings(pieces), dict.fromkeys(tensors, 3))


def two() -> dict[str, torch.Tensor]:
    return {UP: torch.arange(16.0).reshape(4, 4).bfloat16(), NORM: torch.ones(4).bfloat16()}


def read(source: object, name: str) -> torch.Tensor:
    (piece,) = (piece for piece in source.holdings.pieces if piece.name == name)  # type: ignore[attr-defined]
    return source.read(piece)  # type: ignore[attr-defined]


class Sums:
    """A model whose weights hold sums within a context; it counts entries."""

    def __init__(self, tensor: torch.Tensor):
        self._tensor, self.entered = tensor, 0

    @contextmanager
    def merged(self) -> Iterator[None]:
        before = self._tensor.clone()
        self._tensor += 1
        self.entered += 1
        yield
        self._tensor.copy_(before)


@pytest.mark.parametrize("ending", ["end", "abandon"])
def test_sums_are_there_from_complete_to_the_end(ending: str) -> None:
    tensors = two()
    own, sums = tensors[UP].clone(), Sums(tensors[UP])
    source = Merged(plain(tensors), sums.merged)
    for version in range(2):
        source.begin()
        assert source.advance(7) is False
        assert read(source, UP).equal(own)
        source.complete(None)  # type: ignore[arg-type]
        assert read(source, UP).equal(own + 1)
        getattr(source, ending)()
        source.abandon()  # twice is harmless
        assert tensors[UP].equal(own)
        assert sums.entered == version + 1
    assert source.changes is NOTHING_TRACKED


def test_source_filter_sends_only_what_is_wanted() -> None:
    source = Only(plain(two()), lambda name: name != NORM)
    assert [piece.name for piece in source.holdings.pieces] == [UP]
    assert source.ready_after[UP] == 3


def test_changes_by_comparison() -> None:
    """Of strided pieces too; -0 is not 0, NaN is itself, and what is frozen is never looked at."""
    tensors = two() | {"cut": torch.zeros(4, 8).bfloat16()}
    cut = Piece("cut", Box.full((2, 4)), View("cut", 2, (16, 2)), "bfloat16")
    base = PlainSource(tensors, Holdings((whole(UP, (4, 4)), whole(NORM, (4,)), cut)))
    source = Compared(base, lambda piece: piece.name != NORM)
    changes = source.changes
    assert not changes.check()
    assert set(changes.bitmaps()) == {UP, NORM, "cut"}
    tensors[UP][1, 1] = torch.nan
    changes.clear()
    assert changes.check()
    assert changes.elements == 16 + 8
    first = {name: bits.data_ptr() for name, bits in changes.bitmaps().items()}
    assert changes.count_changed() == 0
    changes.clear()
    tensors[UP][0, 0] = -0.0
    tensors[UP][2, 3] = 99
    tensors[NORM][0] = 5
    base.read(cut)[1, 3] = 7
    found = changes.bitmaps()
    assert {name: bits.data_ptr() for name, bits in found.items()} == first  # executors keep them
    assert changed_positions(found, whole(UP, (4, 4))).tolist() == [0, 11]
    assert changed_positions(found, cut).tolist() == [7]
    assert changed_positions(found, whole(NORM, (4,))).tolist() == []
    assert changes.count_changed() == 3
    changes.clear()
    assert changes.count_changed() == 0


def test_rank_without_weights_compares_nothing() -> None:
    changes = Compared(NoSource(), lambda piece: True).changes
    changes.clear()
    assert changes.check()
    assert (changes.bitmaps(), changes.count_changed(), changes.elements) == ({}, 0, 0)


def test_quantized_sums_are_made_anew_after_an_interruption() -> None:
    tensors = {UP: torch.randn(128, 128).bfloat16()}
    sums = Sums(tensors[UP])
    source = Quantized(Merged(plain(tensors), sums.merged), is_quantized, "cpu", keep=True)
    source.agree([], ())
    expected = Quantized(plain({UP: tensors[UP] + 1}), is_quantized, "cpu", keep=False)
    expected.agree([], ())
    expected.begin()
    expected.complete(None)  # type: ignore[arg-type]
    source.begin()
    source.abandon()
    source.begin()
    assert source.advance(3) is False
    source.complete(None)  # type: ignore[arg-type]
    for piece, other in zip(source.holdings.pieces, expected.holdings.pieces, strict=True):
        assert source.read(piece).float().equal(expected.read(other).float())
    source.end()
