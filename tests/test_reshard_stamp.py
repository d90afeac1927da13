"""One layer for all like it, one tensor for all that move alike: against plans of everything."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid3d.reshard.box import Box
from hybrid3d.reshard.coverage import lower_bound
from hybrid3d.reshard.layout import Demand, Holdings, Piece, View
from hybrid3d.reshard.planner import make_plan
from hybrid3d.reshard.stamp import alike, distinct, layer_of, only, stamped
from test_reshard_box import World, worlds

RANDOM = settings(max_examples=60, deadline=None)


def piece(name: str, local: str, start: int = 0, size: int = 4) -> Piece:
    return Piece(name, Box((start,), (size,)), View(local, start, (1,)), "float32")


def test_a_layer_is_found_in_canonical_and_local_names() -> None:
    assert layer_of("model.layers.12.mlp.experts.3.up_proj.weight") == 12
    assert layer_of("stage1.decoder.layers.0.mlp.linear_fc1.weight") == 0
    assert layer_of("model.embed_tokens.weight") is None
    assert layer_of("model.players.3.weight") is None


def test_a_layer_s_pieces_are_another_s_under_its_name() -> None:
    one = piece("model.layers.1.a.layers.1.b", "model.layers.1.a.layers.1.b", 2)
    (other,) = stamped([one], 1, 13)
    assert other == piece("model.layers.13.a.layers.1.b", "model.layers.13.a.layers.1.b", 2)
    (other,) = stamped([one], 1, 13, ("model.layers.1.", "stage2.layers.0."))
    assert other == piece("model.layers.13.a.layers.1.b", "stage2.layers.0.a.layers.1.b", 2)


def test_what_is_in_one_class_is_held_and_wanted_in_the_same_boxes() -> None:
    held = {0: [piece("a", "x"), piece("b", "y")], 1: [piece("c", "x")]}
    holdings = {rank: Holdings(tuple(pieces)) for rank, pieces in held.items()}
    wanted = tuple(piece(name, name) for name in "abc")
    assert alike(holdings, dict.fromkeys((0, 1), Demand(wanted))) == {"a": 2, "c": 1}
    assert alike(holdings, {0: Demand(wanted), 1: Demand(wanted[1:])}) == {"a": 1, "b": 1, "c": 1}


@pytest.mark.parametrize(
    "other",
    [
        piece("b", "y", start=4),
        piece("b", "y", size=3),
        replace(piece("b", "y"), dtype="bfloat16"),
    ],
)
def test_a_class_is_of_one_place_size_and_dtype(other: Piece) -> None:
    one = piece("a", "x")
    both = Demand((piece("a", "x", size=8), piece("b", "y", size=8)))
    assert alike({0: Holdings((one, other))}, {1: both}) == {"a": 1, "b": 1}
    assert alike({1: Holdings(both.pieces)}, {0: Demand((one, other))}) == {"a": 1, "b": 1}
    assert alike({0: Holdings((one,))}, {0: Demand((piece("b", "y"),))}) == {"a": 1, "b": 1}


def test_what_ranks_share_they_share_again() -> None:
    both, other = Demand((piece("a", "x"), piece("b", "y"))), Demand((piece("b", "x"),))
    kept = only({0: both, 1: other, 2: both}, ["b"])
    assert kept == {0: Demand((piece("b", "y"),)), 1: other, 2: Demand((piece("b", "y"),))}
    assert [ranks for ranks, _ in distinct(kept)] == [[0, 2], [1]]


@RANDOM
@given(worlds(), st.integers(1, 4))
def test_a_class_counted_by_one_of_it_receives_what_all_of_it_do(world: World, copies: int) -> None:
    """Each tensor of a random world in several layers: the plan of one layer's, times their number."""

    def repeated(pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
        named = [Piece(f"layers.0.{p.name}", p.box, p.view, p.dtype, p.in_place) for p in pieces]
        return tuple(p for layer in range(copies) for p in stamped(named, 0, layer))

    holdings = {rank: Holdings(repeated(side.pieces)) for rank, side in world.holdings.items()}
    demand = {rank: Demand(repeated(side.pieces)) for rank, side in world.demand.items()}
    times = alike(holdings, demand)
    assert sum(times.values()) == copies * len(
        {p.name for sides in (world.holdings, world.demand) for side in sides.values() for p in side.pieces}
    )
    assert all(layer_of(name) == 0 for name in times)
    received: dict[int, int] = defaultdict(int)
    for t in make_plan(only(holdings, times), only(demand, times), 10_000).transfers:
        if not t.is_local:
            received[t.dst] += t.nbytes * times[t.target.name]
    everything = make_plan(holdings, demand, 10_000)
    assert {rank: n for rank, n in received.items() if n} == {
        rank: n for rank, n in everything.received_bytes.items() if n
    }
    bound = lower_bound(only(holdings, times), only(demand, times), times)
    assert bound == lower_bound(holdings, demand)
