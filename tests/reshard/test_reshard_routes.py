"""Routes by class of tensors, compared with plans that list every transfer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from hybrid3d.reshard.plan.box import Box
from hybrid3d.reshard.plan.classes import (
    Signature,
    classify_tensors,
    group_ranks,
    layer_of,
    rank_groups,
    replicate_layer,
    select_tensors,
    signature_of,
)
from hybrid3d.reshard.plan.coverage import check_routes, lower_bound
from hybrid3d.reshard.plan.layout import Demand, Holdings, LocalPieces, Piece, View
from hybrid3d.reshard.plan.planner import PlanError, Routes, make_plan
from hybrid3d.reshard.plan.relays import Relay
from hybrid3d.reshard.plan.routes import Part, Route, RoutedClass, Source, route_classes
from test_reshard_box import Side, World, transfers_of, worlds

RANDOM = settings(max_examples=60, deadline=None)
Sides = tuple[dict[int, Holdings], dict[int, Demand]]


def piece(name: str, local: str, start: int = 0, size: int = 4) -> Piece:
    return Piece(name, Box((start,), (size,)), View(local, start, (1,)), "float32")


def classes(holdings: dict[int, Holdings], demand: dict[int, Demand]) -> dict[tuple[str, ...], int]:
    found = classify_tensors([side for _, side in rank_groups(holdings)], [side for _, side in rank_groups(demand)])
    return {tensors.names: tensors.count for tensors in found}


def routed(
    sides: Sides, per_node: int, multiplicity: dict[str, int] | None = None, relays: bool = False
) -> list[RoutedClass]:
    holders, readers = rank_groups(sides[0]), rank_groups(sides[1])
    found = classify_tensors([side for _, side in holders], [side for _, side in readers], multiplicity)
    groups = [ranks for ranks, _ in holders], [ranks for ranks, _ in readers]
    return list(route_classes(found, *groups, per_node, relays))


def check(routes: list[RoutedClass], sides: Sides) -> None:
    check_routes(routes, rank_groups(sides[0]), rank_groups(sides[1]))


def repeated(world: World, copies: int) -> Sides:
    """Repeat each tensor of a random world in several layers."""

    def of(pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
        named = [replace(p, name=f"layers.0.{p.name}") for p in pieces]
        return tuple(p for layer in range(copies) for p in replicate_layer(named, 0, layer))

    holdings = {rank: Holdings(of(side.pieces)) for rank, side in world.holdings.items()}
    return holdings, {rank: Demand(of(side.pieces)) for rank, side in world.demand.items()}


def test_tensors_of_one_class_share_held_and_wanted_boxes() -> None:
    held = {0: [piece("a", "x"), piece("b", "y")], 1: [piece("c", "x")]}
    holdings = {rank: Holdings(tuple(pieces)) for rank, pieces in held.items()}
    wanted = tuple(piece(name, name) for name in "abc")
    assert classes(holdings, dict.fromkeys((0, 1), Demand(wanted))) == {("a", "b"): 2, ("c",): 1}
    others = {0: Demand(wanted), 1: Demand(wanted[1:])}
    assert classes(holdings, others) == {("a",): 1, ("b",): 1, ("c",): 1}


@pytest.mark.parametrize(
    "other",
    [
        piece("b", "y", start=4),
        piece("b", "y", size=3),
        replace(piece("b", "y"), dtype="bfloat16"),
    ],
)
def test_class_is_of_one_place_size_and_dtype(other: Piece) -> None:
    one = piece("a", "x")
    both = Demand((piece("a", "x", size=8), piece("b", "y", size=8)))
    apart = {("a",): 1, ("b",): 1}
    assert classes({0: Holdings((one, other))}, {1: both}) == apart
    assert classes({1: Holdings(both.pieces)}, {0: Demand((one, other))}) == apart


@RANDOM
@given(worlds())
def test_signature_has_everything_except_memory_locations(world: World) -> None:
    for side in (*world.holdings.values(), *world.demand.values()):
        signature = signature_of(side)
        listed = Counter((name, *box) for boxes, names in signature.items() for name in names for box in boxes)
        assert listed == Counter((p.name, p.box, p.dtype) for p in side.pieces)
        named = [name for names in signature.values() for name in names]
        assert len(set(named)) == len(named), "a tensor's boxes stand together"
        elsewhere = [replace(p, view=View("other", 9, tuple(s + 1 for s in p.view.stride))) for p in side.pieces]
        assert signature_of(replace(side, pieces=tuple(elsewhere))) == signature


def test_ranks_that_share_an_object_are_one_group() -> None:
    both, other = Demand((piece("a", "x"), piece("b", "y"))), Demand((piece("b", "x"),))
    signature = {((piece("a", "x").box, "float32"),): ("a", "b")}
    assert rank_groups({2: both, 1: other, 0: both}) == [([0, 2], signature), ([1], signature_of(other))]


def test_ranks_that_shared_an_object_share_the_selected_one() -> None:
    both, other = Demand((piece("a", "x"), piece("b", "y"))), Demand((piece("b", "x"),))
    kept = select_tensors({0: both, 1: other, 2: both}, ["b"])
    assert kept == {0: Demand((piece("b", "y"),)), 1: other, 2: Demand((piece("b", "y"),))}
    assert [ranks for ranks, _ in group_ranks(kept)] == [[0, 2], [1]]


@RANDOM
@given(worlds(layers=("",)), st.integers(1, 4), st.integers(1, 3), st.booleans())
def test_routes_of_one_layer_give_the_traffic_of_all_layers(
    world: World, copies: int, per_node: int, relays: bool
) -> None:
    """Traffic by sender and receiver, of one layer times the layers, against the plan of every transfer."""
    sides = repeated(world, copies)
    kept = {p.name for side in sides for of in side.values() for p in of.pieces if layer_of(p.name) == 0}
    first = select_tensors(sides[0], kept), select_tensors(sides[1], kept)
    routes = routed(first, per_node, dict.fromkeys(kept, copies), relays)
    sent: Counter[tuple[int, int]] = Counter()
    for routed_class in routes:
        for source in routed_class.sources:
            for src, dst, nbytes in zip(*(a.flat for a in source.traffic(routed_class.tensors.count)), strict=True):
                sent[int(src), int(dst)] += int(nbytes)
        for route in routed_class.routes:
            for part in (p for parts in route.parts.values() for p in parts if isinstance(p.source, Relay)):
                for reader in route.readers:
                    sent[part.source.sender(reader, 0), reader] += part.nbytes * routed_class.tensors.count
    planned: Counter[tuple[int, int]] = Counter()
    for t in transfers_of(make_plan(*sides, 10_000, per_node, relays)):
        planned[t.src, t.dst] += 0 if t.is_local else t.nbytes
    assert +sent == +planned
    bound = lower_bound(*first, dict.fromkeys(kept, copies))
    received = {rank: sum(n for (_, dst), n in sent.items() if dst == rank) for rank in bound}
    assert received == bound == lower_bound(*sides)
    check(routes, first)


@RANDOM
@given(st.integers(1, 6), st.integers(1, 7), st.integers(1, 30))
def test_replicas_take_turns(replicas: int, readers: int, count: int) -> None:
    """Over all readers and tensors, the messages that replicas send differ by at most one."""
    source = Source(Box((0,), (8,)), tuple(range(replicas)), {100 + reader: 32 for reader in range(readers)})
    source.fix_order(Counter())
    messages_sent = Counter(source.sender(reader, number) for number in range(count) for reader in source.readers)
    each = [messages_sent.get(rank, 0) for rank in range(replicas)]
    assert sum(each) == readers * count
    assert max(each) - min(each) <= 1
    senders, _, nbytes = source.traffic(count)
    counted = np.bincount(senders.ravel(), nbytes.ravel(), replicas) / 32
    assert counted.tolist() == each


def wrong_box(part: Part) -> Part:
    start = (part.box.start[0] + 1, *part.box.start[1:])
    return replace(part, box=Box(start, part.box.size))


def smaller(part: Part) -> Part:
    return replace(part, box=Box(part.box.start, (part.box.size[0] - 1, *part.box.size[1:])))


def local(part: Part) -> Part:
    return replace(part, source=None)


def from_nobody(part: Part) -> Part:
    assert part.source is not None
    return replace(part, source=Source(part.held, (99,)))


@pytest.mark.parametrize("spoil", [wrong_box, smaller, local, from_nobody])
def test_broken_route_is_refused(spoil: Callable[[Part], Part]) -> None:
    held, wanted = Side(4), Side(4)
    for rank in range(4):
        held.add(rank, "t", Box((rank * 2, 0), (2, 3)), "float32")
        wanted.add(rank, "t", Box((0, 0), (8, 3)), "float32")
    world = World({"t": (8, 3)}, held, wanted)
    sides = world.holdings, world.demand
    (routed_class,) = routed(sides, 4)
    check([routed_class], sides)
    first = routed_class.routes[0]
    ((box, parts),) = first.parts.items()
    at = next(i for i, part in enumerate(parts) if part.source is not None)
    broken = {box: (*parts[:at], spoil(parts[at]), *parts[at + 1 :])}
    routes = Route(first.readers, broken, ()), *routed_class.routes[1:]
    spoiled = RoutedClass(routed_class.tensors, routes, sources_of(routed_class, broken))
    with pytest.raises(PlanError, match="t"):
        check([spoiled], sides)
    with pytest.raises(PlanError, match="nothing arrives"):
        check([RoutedClass(routed_class.tensors, routed_class.routes[1:], routed_class.sources)], sides)


def sources_of(routed_class: RoutedClass, parts: dict[Box, tuple[Part, ...]]) -> tuple[Source, ...]:
    new = [part.source for parts_of_box in parts.values() for part in parts_of_box if part.source is not None]
    return tuple({id(source): source for source in (*routed_class.sources, *new)}.values())


@RANDOM
@given(worlds())
def test_element_that_nobody_holds_is_missing(world: World) -> None:
    rank = next((rank for rank, side in world.demand.items() if any(p.box.numel for p in side.pieces)), None)
    assume(rank is not None)
    lost = next(p.name for p in world.demand[rank].pieces if p.box.numel)
    holdings = {r: Holdings(tuple(p for p in side.pieces if p.name != lost)) for r, side in world.holdings.items()}
    routes = routed((holdings, world.demand), 2)
    lost_class = next(routed_class for routed_class in routes if lost in routed_class.tensors.names)
    assert any(route.missing for route in lost_class.routes)


@RANDOM
@given(worlds(), st.integers(1, 3), st.booleans())
def test_sharing_an_object_does_not_change_the_plan(world: World, per_node: int, relays: bool) -> None:
    """When a plan is computed before the run, ranks share one demand object; in a run each has its own."""
    wanted = next(iter(world.demand.values()))
    ranks = sorted(world.holdings)
    shared, own = dict.fromkeys(ranks, wanted), {rank: replace(wanted) for rank in ranks}
    assert len(group_ranks(shared)) == 1
    assert len(group_ranks(own)) == len(ranks)
    backwards = dict(reversed(own.items()))
    plan = make_plan(world.holdings, shared, 64, per_node, relays)
    assert plan == make_plan(world.holdings, own, 64, per_node, relays)
    assert plan == make_plan(world.holdings, backwards, 64, per_node, relays)


SOME = st.sets(st.sampled_from("ab"))


@settings(max_examples=200, deadline=None)
@example(
    [{"a"}, {"a", "b"}, set(), set()], [{"a"}, set(), {"a", "b"}, {"a"}], 3, False
)  # replicas on the node and elsewhere
@given(st.lists(SOME, min_size=4, max_size=4), st.lists(SOME, min_size=4, max_size=4), st.integers(1, 4), st.booleans())
def test_grouping_of_ranks_does_not_change_the_transfers(
    held: list[set[str]], wanted: list[set[str]], per_node: int, relays: bool
) -> None:
    """Ranks with equal signatures are one group in a run, in any order, and may be several groups elsewhere."""
    wanted = [names & set().union(*held) for names in wanted]
    sides = [{rank: signature(names) for rank, names in enumerate(side)} for side in (held, wanted)]
    own = [[([rank], signature) for rank, signature in side.items()] for side in sides]
    merged = [[(ranks, side[ranks[0]]) for ranks in equal(side)] for side in sides]
    transfers = []
    for holders, readers in (own, merged, [side[::-1] for side in own], [side[::-1] for side in merged]):
        routes = Routes(holders, readers, 64, per_node, relays)
        transfers.append(
            [
                [(key, t.src, t.dst, t.name) for key, t in routes.rank_transfers(r, LocalPieces({}, {}))]
                for r in range(4)
            ]
        )
    assert transfers == [transfers[0]] * 4


def signature(names: set[str]) -> Signature:
    return signature_of(Demand(tuple(piece(name, name) for name in sorted(names))))


def equal(side: dict[int, Signature]) -> list[list[int]]:
    """Return the ranks of each signature."""
    return [
        list(ranks) for ranks in dict.fromkeys(tuple(r for r in side if side[r] == value) for value in side.values())
    ]
