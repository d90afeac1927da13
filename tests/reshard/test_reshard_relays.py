"""What several ranks of a node want and none holds crosses the network once; elements are counted by numpy."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hybrid3d.reshard.plan.box import Box
from hybrid3d.reshard.plan.classes import classify_tensors, rank_groups
from hybrid3d.reshard.plan.coverage import check_coverage, check_routes, lower_bound, network_lower_bound
from hybrid3d.reshard.plan.layout import ITEMSIZE
from hybrid3d.reshard.plan.planner import Plan, PlanError, RankPlan, Transfer, make_plan
from hybrid3d.reshard.plan.relays import Relay
from hybrid3d.reshard.plan.routes import route_classes
from test_reshard_box import LAYERS, Side, World, check_moves, index, mask, random_grid, times_covered, transfers_of

RANDOM = settings(max_examples=50, deadline=None)
LIMITS = st.integers(4, 300)


@st.composite
def nodes(draw: st.DrawFn) -> tuple[World, int]:
    """Draw a world of several nodes, and the ranks of a node.

    Each rank wants boxes of one of two grids of a tensor, so that boxes of ranks are equal or overlap; dtypes mostly
    agree.
    """
    per_node = draw(st.integers(2, 4))
    random = Random(draw(st.integers(0, 1 << 30)))
    ranks = per_node + random.randint(1, per_node)  # the second node may have fewer ranks
    shapes = {
        f"{random.choice(LAYERS)}t{i}": tuple(random.randint(1, 9) for _ in range(random.randint(0, 3)))
        for i in range(random.randint(1, 4))
    }
    world = World(shapes, Side(ranks), Side(ranks))
    for name, shape in shapes.items():
        ours, theirs = random.choices(["float32", "bfloat16"], k=2)
        for box in random_grid(random, shape):
            for rank in random.sample(range(ranks), random.randint(1, 2)):
                world.held.add(rank, name, box, ours, _order(random, shape))
        grids = [random_grid(random, shape) for _ in range(2)]
        share = random.choice([0.5, 0.9])
        for rank in range(ranks):
            dtype = random.choice([theirs, theirs, theirs, "float32"])
            for box in grids[random.random() < 0.3]:
                if random.random() < share:
                    world.wanted.add(rank, name, box, dtype, _order(random, shape), random.choice([0, 0, 1]))
    for pieces in world.wanted.pieces.values():
        random.shuffle(pieces)
    return world, per_node


def _order(random: Random, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    return random.choice([None, tuple(random.sample(range(len(shape)), len(shape)))])


def planned(world: World, per_node: int, limit: int = 64) -> Plan:
    return make_plan(world.holdings, world.demand, limit, per_node, relays=True)


def network_bound(world: World, per_node: int) -> dict[int, int]:
    """Return the bytes that each node's ranks want and none of them holds, counted one by one."""
    bound: dict[int, int] = defaultdict(int)
    for name, shape in world.shapes.items():
        for first in range(0, len(world.held.pieces), per_node):
            ranks = range(first, min(first + per_node, len(world.held.pieces)))
            held = np.any([world.has(world.held, rank, name) for rank in ranks], axis=0)
            for dtype in ITEMSIZE:
                wanted = np.zeros(shape, dtype=bool)
                for rank in ranks:
                    for piece in world.wanted.pieces[rank]:
                        if (piece.name, piece.dtype) == (name, dtype):
                            wanted[index(piece.box)] = True
                bound[first // per_node] += int((wanted & ~held).sum()) * ITEMSIZE[dtype]
    return dict(bound)


def bytes_into_nodes(plan: Plan, per_node: int) -> dict[int, int]:
    found = Counter[int]()
    for t in transfers_of(plan):
        if t.src // per_node != t.dst // per_node:
            found[t.dst // per_node] += t.nbytes
    return found


@RANDOM
@given(nodes(), LIMITS)
def test_network_bytes_and_received_bytes_are_their_bounds(case: tuple[World, int], limit: int) -> None:
    world, per_node = case
    plan = planned(world, per_node, limit)
    check_moves(world, plan)
    check_coverage(plan, world.holdings, world.demand)
    received = lower_bound(world.holdings, world.demand)
    for rank, part in plan.items():
        assert part.received_bytes == received[rank] == world.must_receive(rank)
    bound, into = network_bound(world, per_node), bytes_into_nodes(plan, per_node)
    assert {node: into.get(node, 0) for node in bound} == bound
    groups = rank_groups(world.holdings), rank_groups(world.demand)
    assert network_lower_bound(*groups, per_node) == bound
    assert network_lower_bound(*groups, per_node, nodes={1}) == {1: bound[1]}


@RANDOM
@given(nodes(), LIMITS)
def test_box_is_relayed_after_arrival_and_before_its_layer_closes(case: tuple[World, int], limit: int) -> None:
    world, per_node = case
    plan = planned(world, per_node, limit)
    for rank, part in plan.items():
        numbers = [bucket.number for bucket in part.buckets]
        assert numbers == sorted(set(numbers))
        for i, bucket in enumerate(part.buckets):
            outgoing = [t for t in bucket.transfers if t.relayed and t.src == rank]
            brings = [
                j
                for j, earlier in enumerate(part.buckets)
                for t in earlier.transfers
                if t.dst == rank and any((t.name, t.box) == (o.name, o.box) for o in outgoing)
            ]
            assert len(brings) == len({(t.name, t.box) for t in outgoing})
            assert part.awaited[i] == max(brings, default=-1) < i
            assert {t.relayed for t in bucket.transfers} == {bool(outgoing)} or not outgoing
            for t in outgoing:
                assert t.src // per_node == t.dst // per_node
                layers = {b.layer for b in part.buckets if t in b.transfers}
                written = {b.layer for b in part.buckets for a in b.transfers if (a.name, a.dst) == (t.name, rank)}
                assert layers == written


@pytest.mark.parametrize(("rows", "limit"), [(16, 1 << 20), (16, 64), (3, 1 << 20), (1, 1 << 20)])
@pytest.mark.parametrize("replicas", [2, 4])
def test_ranks_of_a_node_receive_equal_shares(rows: int, limit: int, replicas: int) -> None:
    """Rank 0 holds all, on a node of its own; the ranks of the other node want all of it."""
    world = World({f"layers.{i}.t": (rows, 4) for i in range(4)}, Side(2 * replicas), Side(2 * replicas))
    for name, shape in world.shapes.items():
        world.held.add(0, name, Box.full(shape))
        for rank in range(replicas, 2 * replicas):
            world.wanted.add(rank, name, Box.full(shape))
    plan = planned(world, replicas, limit)
    check_coverage(plan, world.holdings, world.demand)
    far = [sum(t.nbytes for t in plan[r].transfers if t.src == 0 and t.dst == r) for r in range(replicas, 2 * replicas)]
    total = 4 * rows * 16
    assert sum(far) == total
    if rows % replicas == 0 or rows == 1:  # single rows: the ranks take turns
        assert far == [total // replicas] * replicas
    assert plan[0].sent_bytes == total


def test_relays_change_nothing_without_a_second_reader_on_a_node() -> None:
    world = World({"layers.0.a": (8, 4), "b": (6,)}, Side(4), Side(4))
    for i, (name, shape) in enumerate(world.shapes.items()):
        world.held.add(i, name, Box.full(shape))
        for rank in (0, 3):
            world.wanted.add(rank, name, Box.full(shape))
    assert planned(world, 2) == make_plan(world.holdings, world.demand, 64, 2)


def relayed_of(plan: Plan) -> list[Transfer]:
    return [t for t in transfers_of(plan) if t.relayed]


def changed(plan: Plan, old: Transfer, *new: Transfer) -> Plan:
    """Return a plan in which other transfers replace one in all buckets and messages."""

    def of(transfers: tuple[Transfer, ...]) -> tuple[Transfer, ...]:
        return tuple(n for t in transfers for n in (new if t == old else (t,)))

    def part(rank: int, rank_plan: RankPlan) -> RankPlan:
        buckets = []
        for bucket in rank_plan.buckets:
            messages = tuple(replace(m, transfers=of(m.transfers)) for m in bucket.messages)
            buckets.append(replace(bucket, transfers=of(bucket.transfers), messages=messages))
        return RankPlan(rank, tuple(buckets))

    return {rank: part(rank, rank_plan) for rank, rank_plan in plan.items()}


@RANDOM
@given(nodes(), st.data())
def test_box_that_is_handed_on_too_early_is_refused(case: tuple[World, int], data: st.DataObject) -> None:
    world, per_node = case
    plan = planned(world, per_node)
    relayed = relayed_of(plan)
    assume(relayed)
    t = data.draw(st.sampled_from(relayed))
    for rank in (t.src, t.dst):  # in the bucket that brings it, or in an earlier one
        buckets = list(plan[rank].buckets)
        at = next(i for i, bucket in enumerate(buckets) if t in bucket.transfers)
        brings = next(
            b.number
            for b in plan[t.src].buckets
            for a in b.transfers
            if a.dst == t.src and (a.name, a.box) == (t.name, t.box)
        )
        number = data.draw(st.integers(0, brings))
        message = next(m for m in buckets[at].messages if t in m.transfers)
        rest = tuple(a for a in message.transfers if a != t)
        others = tuple(m for m in buckets[at].messages if m is not message)
        buckets[at] = replace(
            buckets[at],
            transfers=tuple(a for a in buckets[at].transfers if a != t),
            messages=(*others, *([replace(message, transfers=rest)] if rest else [])),
        )
        early = next((i for i, b in enumerate(buckets) if b.number == number), None)
        alone = replace(message, transfers=(t,), tag=1000)
        if early is None:
            early = sum(b.number < number for b in buckets)
            buckets.insert(early, replace(buckets[at], number=number, transfers=(t,), messages=(alone,)))
        else:
            b = buckets[early]
            buckets[early] = replace(b, transfers=(*b.transfers, t), messages=(*b.messages, alone))
        plan = {**plan, rank: RankPlan(rank, tuple(buckets))}
    with pytest.raises(PlanError, match="which it has not received before"):
        check_coverage(plan, world.holdings, world.demand)


@RANDOM
@given(nodes(), st.data())
def test_broken_relay_is_refused(case: tuple[World, int], data: st.DataObject) -> None:
    world, per_node = case
    plan = planned(world, per_node)
    relayed = relayed_of(plan)
    assume(relayed)
    t = data.draw(st.sampled_from(relayed))
    others = [rank for rank in plan if rank not in (t.src, t.dst)]
    first = next(a for a in transfers_of(plan) if a.dst == t.src and (a.name, a.box) == (t.name, t.box))
    elsewhere = replace(t.source, view=replace(t.source.view, offset=t.source.view.offset + 1000))
    broken = [
        (t, replace(t, relayed=False)),  # read from weights that it does not hold
        (t, replace(t, source=None)),
        (t, replace(t, source=elsewhere)),
        (t,),
        (t, t, t),
        (t, replace(t, handed_on=True)),
        (first, replace(first, handed_on=False)),
        (first, replace(first, relayed=True)),  # a circle, or out of nothing
        *((t, replace(t, dst=rank)) for rank in others),
        *((t, replace(t, src=rank)) for rank in others),
    ]
    for old, *new in broken:
        with pytest.raises(PlanError):
            check_coverage(changed(plan, old, *new), world.holdings, world.demand)
    check_coverage(plan, world.holdings, world.demand)


@RANDOM
@given(nodes(), st.data())
def test_broken_share_is_refused(case: tuple[World, int], data: st.DataObject) -> None:
    """The check of routes, on which `hybrid3d plan` relies: what is handed on must have been received by its sender."""
    world, per_node = case
    holders, readers = rank_groups(world.holdings), rank_groups(world.demand)
    classes = classify_tensors([side for _, side in holders], [side for _, side in readers])
    groups = [ranks for ranks, _ in holders], [ranks for ranks, _ in readers]
    routed = list(route_classes(classes, *groups, per_node, relays=True))
    check_routes(routed, holders, readers)
    handed_on = [
        (routed_class, route, wanted, part)
        for routed_class in routed
        for route in routed_class.routes
        for wanted, parts in route.parts.items()
        for part in parts
        if part.handed_on or isinstance(part.source, Relay)
    ]
    assume(handed_on)
    routed_class, route, wanted, part = data.draw(st.sampled_from(handed_on))
    if isinstance(part.source, Relay):
        others = {(part.source.position + i) % per_node for i in range(1, per_node)}
        broken = [replace(part, source=replace(part.source, position=position)) for position in others]
    else:
        broken = [replace(part, handed_on=False)]
    for new in broken:
        parts = tuple(new if p is part else p for p in route.parts[wanted])
        spoiled = replace(route, parts={**route.parts, wanted: parts})
        routes = tuple(spoiled if r is route else r for r in routed_class.routes)
        those = [replace(c, routes=routes) if c is routed_class else c for c in routed]
        with pytest.raises(PlanError, match="which it would hand on"):
            check_routes(those, holders, readers)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 9), max_size=4).map(tuple), st.integers(1, 12))
def test_split_evenly_covers_a_box_and_sizes_differ_by_one(size: tuple[int, ...], count: int) -> None:
    box = Box((2,) * len(size), size)
    parts = box.split_evenly(count)
    shape = tuple(n + 2 for n in size)
    assert (times_covered(shape, parts) == mask(shape, box)).all()
    assert len(parts) == min(count, max(size, default=1))
    for dim in range(len(size)):
        sizes = {part.size[dim] for part in parts}
        assert max(sizes) - min(sizes) <= 1
