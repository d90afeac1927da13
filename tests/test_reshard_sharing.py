"""Which tensors can alias the memory that they are copied from, compared with element addresses from numpy."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings

from hybrid3d.reshard.plan.box import Box
from hybrid3d.reshard.plan.layout import Piece
from hybrid3d.reshard.plan.planner import Transfer, make_plan
from hybrid3d.reshard.sharing import StorageAlias, find_storage_aliases
from test_reshard_box import Side, World, addresses, worlds


def of_rank(world: World, rank: int) -> tuple[list[Transfer], dict[str, int]]:
    plan = make_plan(world.holdings, world.demand, 64)
    arriving = [t for t in plan[rank].transfers if t.dst == rank]
    return arriving, {dtype: n for (r, dtype), n in world.wanted.length.items() if r == rank}


def one(tensor: str = "layers.0.a", held: str = "float32", **wanted) -> World:
    """Return a world in which rank 0 wants one tensor that it holds, and a small one in a layer with another."""
    world = World({}, Side(2), Side(2))
    world.held.add(1, "layers.0.b", Box.full((3,)))
    world.wanted.add(0, "layers.0.b", Box.full((3,)), "bfloat16")
    world.held.add(0, tensor, Box.full((4, 6)), held)
    world.wanted.add(0, tensor, Box.full((4, 6)), "float32", **wanted)
    world.shapes |= {tensor: (4, 6), "layers.0.b": (3,)}
    return world


def test_what_lies_as_it_is_wanted_is_shared() -> None:
    assert find_storage_aliases(*with_demand(one())) == {"float32": StorageAlias("float32", 0)}


def with_demand(world: World):
    arriving, sizes = of_rank(world, 0)
    return arriving, world.demand[0], sizes


def test_what_does_not_is_copied() -> None:
    for other in (one(held="bfloat16"), one(order=(1, 0)), one(gap=1)):
        assert find_storage_aliases(*with_demand(other)) == {}
    arriving, demand, sizes = with_demand(one())
    assert find_storage_aliases(arriving, demand, sizes | {"float32": 25}) == {}, "an element is left out"


def test_a_layer_keeps_a_tensor_to_receive() -> None:
    world = World({"layers.0.a": (8,), "layers.0.b": (4,)}, Side(1), Side(1))
    for name, dtype in (("layers.0.a", "float32"), ("layers.0.b", "bfloat16")):
        for side in (world.held, world.wanted):
            side.add(0, name, Box.full(world.shapes[name]), dtype)
    assert find_storage_aliases(*with_demand(world)) == {"float32": StorageAlias("float32", 0)}


@settings(max_examples=200, deadline=None)
@given(worlds())
def test_each_element_of_a_shared_tensor_is_the_one_that_is_wanted(world: World) -> None:
    for rank in world.wanted.pieces:
        arriving, sizes = of_rank(world, rank)
        for tensor, sharing in find_storage_aliases(arriving, world.demand[rank], sizes).items():
            seen = set()
            for piece in (p for p in world.wanted.pieces[rank] if p.view.tensor == tensor):
                held = [p for p in world.held.pieces[rank] if (p.name, p.view.tensor) == (piece.name, sharing.source)]
                there = {place for source in held for place in places(source)}
                for element, at in places(piece):
                    assert (element, at + sharing.offset) in there
                    seen.add(at)
            assert seen == set(range(sizes[tensor]))


def places(piece: Piece) -> list[tuple[tuple, int]]:
    """Return (index in the canonical tensor, address) for each element of a piece."""
    whole = [tuple(np.add(piece.box.start, at).tolist()) for at in np.ndindex(*piece.box.size)]
    return list(zip(whole, addresses(piece).ravel().tolist(), strict=True))
