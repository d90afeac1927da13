"""Plans over random layouts, judged by counting elements one by one: nothing here asks the library's own checker."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hybrid3d.reshard.box import Box
from hybrid3d.reshard.coverage import check_coverage, check_same_tensors, lower_bound
from hybrid3d.reshard.layout import ITEMSIZE, Demand, Holdings, Piece, View
from hybrid3d.reshard.planner import DIRECT_BYTES, FILES, Bucket, Message, Plan, PlanError, Transfer, make_plan
from test_reshard_box import Shape, Side, World, addresses, check_moves, index, worlds

RANDOM = settings(max_examples=60, deadline=None)


@RANDOM
@given(worlds(), st.integers(4, 200))
def test_every_wanted_element_lands_once_from_a_rank_that_holds_it(world: World, limit: int) -> None:
    plan = make_plan(world.holdings, world.demand, limit)
    check_moves(world, plan.transfers)
    check_coverage(plan, world.holdings, world.demand)


@RANDOM
@given(worlds(), st.integers(4, 200), st.integers(1, 3))
def test_received_bytes_are_the_lower_bound(world: World, limit: int, ranks_per_node: int) -> None:
    plan = make_plan(world.holdings, world.demand, limit, ranks_per_node)
    bound = lower_bound(world.holdings, world.demand)
    for rank in world.wanted.pieces:
        assert plan.received_bytes.get(rank, 0) == bound[rank] == world.must_receive(rank)
        wanted = sum(p.box.numel * ITEMSIZE[p.dtype] for p in world.wanted.pieces[rank])
        assert plan.local_bytes.get(rank, 0) == wanted - bound[rank]
    assert sum(plan.sent_bytes.values()) == sum(plan.received_bytes.values())


@RANDOM
@given(worlds(), st.integers(1, 3))
def test_the_nearest_rank_that_holds_an_element_gives_it(world: World, ranks_per_node: int) -> None:
    for t in make_plan(world.holdings, world.demand, 64, ranks_per_node).transfers:
        holds = {r: world.has(world.held, r, t.target.name)[index(t.target.box)].any() for r in world.held.pieces}
        if t.src != t.dst:
            assert not holds[t.dst]
        if t.src // ranks_per_node != t.dst // ranks_per_node:
            assert not any(held for r, held in holds.items() if r // ranks_per_node == t.dst // ranks_per_node)


@RANDOM
@given(st.integers(2, 5), st.lists(st.integers(1, 30), min_size=1, max_size=25))
def test_replicas_share_the_sending(replicas: int, rows: list[int]) -> None:
    """Who has sent least goes next, so no two replicas are ever further apart than the largest piece."""
    held, wanted = Side(replicas + 1), Side(replicas + 1)
    for i, n in enumerate(rows):
        wanted.add(replicas, f"t{i}", Box.whole((n, 2)), "float32")
        for rank in range(replicas):
            held.add(rank, f"t{i}", Box.whole((n, 2)), "float32")
    world = World({f"t{i}": (n, 2) for i, n in enumerate(rows)}, held, wanted)
    sent = make_plan(world.holdings, world.demand, 64).sent_bytes
    each = [sent.get(rank, 0) for rank in range(replicas)]
    assert max(each) - min(each) <= max(rows) * 8


@RANDOM
@given(worlds(), st.integers(4, 100))
def test_buckets_are_bounded_on_every_rank_and_keep_the_demand_s_order(world: World, limit: int) -> None:
    plan = make_plan(world.holdings, world.demand, limit)
    load: dict[int, int] = {}
    for bucket in plan.buckets:
        full, load = load, defaultdict(int)
        for t in bucket.transfers:
            if t.src != t.dst:
                load[t.src] += t.target.box.numel * ITEMSIZE[t.target.dtype]
                load[t.dst] += t.target.box.numel * ITEMSIZE[t.target.dtype]
        assert max(load.values(), default=0) <= limit
        first = bucket.transfers[0]  # of which the bucket before had no room
        assert not full or max(full.get(first.src, 0), full.get(first.dst, 0)) + first.nbytes > limit
    for rank, pieces in world.wanted.pieces.items():
        order = [piece_of(t.target, pieces) for t in plan.transfers if t.dst == rank]
        assert order == sorted(order)


def piece_of(part: Piece, pieces: list[Piece]) -> int:
    return next(i for i, p in enumerate(pieces) if p.name == part.name and p.box.contains(part.box))


@RANDOM
@given(worlds(), st.integers(4, 100))
def test_messages_carry_what_is_not_local_and_staging_is_what_they_pack(world: World, limit: int) -> None:
    plan = make_plan(world.holdings, world.demand, limit)
    tags = [m.tag for m in plan.messages]
    assert len(set(tags)) == len(tags)
    for bucket in plan.buckets:
        carried = [t for m in bucket.messages for t in m.transfers]
        assert sorted(map(repr, carried)) == sorted(repr(t) for t in bucket.transfers if t.src != t.dst)
        for m in bucket.messages:
            assert {(t.src, t.dst, t.target.dtype) for t in m.transfers} == {(m.src, m.dst, m.dtype)}
    for rank in world.held.pieces:
        mine = [bucket for bucket in plan.buckets if any(rank in (t.src, t.dst) for t in bucket.transfers)]
        staged = [sum(staging(m.transfers, rank) for m in bucket.messages) for bucket in mine]
        assert plan.staging_bytes[rank] == max(staged[0::2], default=0) + max(staged[1::2], default=0)
        assert plan.staging_bytes[rank] <= 2 * limit
        for whole, part in zip(mine, plan.of(rank), strict=True):
            for theirs, ours in ((whole.transfers, part.transfers), (whole.messages, part.messages)):
                assert ours == tuple(x for x in theirs if rank in (x.src, x.dst))


def staging(transfers: tuple[Transfer, ...], rank: int) -> int:
    """Bytes that a rank packs or unpacks: all but a lone box that its own memory can send or take as it is."""
    (t, *more) = transfers
    if rank not in (t.src, t.dst):
        return 0
    end = t.source if rank == t.src else t.target
    runs = (addresses(end).ravel() == end.view.offset + np.arange(end.box.numel)).all()
    ready = t.source.dtype == t.target.dtype if rank == t.src else t.target.in_place
    return 0 if runs and ready and not more else sum(t.target.box.numel * ITEMSIZE[t.target.dtype] for t in transfers)


def sharded(side: Side, name: str, shape: Shape, dim: int, ranks: list[int], shards: int) -> None:
    """Cut a tensor along a dim and deal the shards to ranks in turn; more ranks than shards are replicas."""
    for i, rank in enumerate(ranks):
        start, size = [0] * len(shape), list(shape)
        size[dim] = shape[dim] // shards
        start[dim] = i % shards * size[dim]
        side.add(rank, name, Box(tuple(start), tuple(size)))


@pytest.mark.parametrize(
    ("train", "dim", "rollout", "received"),
    [
        # Who holds layers 0 and 1, the dim they are cut along, shards of the rollout. A layer is 8 x 8 x 4 = 256 bytes.
        (([0, 1], [2, 3]), 0, 4, [64, 128, 128, 64]),  # TP2 PP2 -> TP4: rank 0 and 3 hold a quarter of what they want
        (([0, 1], [2, 3]), 1, 4, [64, 128, 128, 64]),  # the same by columns
        (([0, 1], [2, 3]), 0, 2, [128, 128, 128, 128]),  # -> TP2 DP2: everyone holds one of two halves
        (([0, 1, 2, 3],) * 2, 0, 1, [384, 384, 384, 384]),  # TP4 -> DP4: three quarters of both layers
        (([0, 0, 0, 0],) * 2, 0, 4, [0, 128, 128, 128]),  # one rank holds all
    ],
)
def test_layouts_worked_out_by_hand(
    train: tuple[list[int], list[int]], dim: int, rollout: int, received: list[int]
) -> None:
    world = World({"layer0": (8, 8), "layer1": (8, 8)}, Side(4), Side(4))
    for layer, ranks in enumerate(train):
        sharded(world.held, f"layer{layer}", (8, 8), dim, ranks, len(ranks))
        sharded(world.wanted, f"layer{layer}", (8, 8), dim, [0, 1, 2, 3], rollout)
    plan = make_plan(world.holdings, world.demand, 64)
    assert [plan.received_bytes.get(rank, 0) for rank in range(4)] == received
    assert [lower_bound(world.holdings, world.demand)[rank] for rank in range(4)] == received
    check_moves(world, plan.transfers)


def one_tensor(shape: Shape) -> World:
    """Rank 0 holds a tensor, rank 1 wants it."""
    world = World({"t": shape}, Side(2), Side(2))
    world.held.add(0, "t", Box.whole(shape))
    world.wanted.add(1, "t", Box.whole(shape))
    return world


def test_a_box_larger_than_a_bucket_is_cut_into_runs_of_rows() -> None:
    plan = make_plan(one_tensor((10, 6)).holdings, one_tensor((10, 6)).demand, 29 * 4)
    assert [[t.target.box.size for t in bucket.transfers] for bucket in plan.buckets] == [[(4, 6)], [(4, 6)], [(2, 6)]]


def test_large_contiguous_boxes_travel_alone_and_small_ones_together() -> None:
    world, rows = World({}, Side(2), Side(2)), DIRECT_BYTES // 4
    for name, shape in [("small", (3,)), ("large", (rows,)), ("less", (rows - 1,)), ("more", (rows, 1))]:
        world.held.add(0, name, Box.whole(shape))
        world.wanted.add(1, name, Box.whole(shape))
    plan = make_plan(world.holdings, world.demand, 1 << 30)
    assert [[t.target.name for t in m.transfers] for m in plan.messages] == [["small", "less"], ["large"], ["more"]]
    assert plan.staging_bytes[0] == plan.staging_bytes[1] == (3 + rows - 1) * 4


def test_files_at_one_end_are_local_and_own_memory_comes_first() -> None:
    world = one_tensor((4, 2))
    (piece,) = world.held.pieces[0]
    load = make_plan({FILES: Holdings((piece,))}, {**world.demand, 0: Demand(())}, 4)
    assert [(t.src, t.dst, t.is_local) for t in load.transfers] == [(FILES, 1, True)]
    export = make_plan(world.holdings, {FILES: Demand((piece,))}, 4)
    assert [(t.src, t.dst, t.is_local) for t in export.transfers] == [(0, FILES, True)]
    assert lower_bound(world.holdings, {FILES: Demand((piece,))}) == {FILES: 0}
    for plan in (load, export):
        assert not list(plan.messages)
        assert sum(plan.local_bytes.values()) == 32
    both = make_plan({FILES: Holdings((piece,)), 1: Holdings((piece,))}, world.demand, 4)
    assert [t.src for t in both.transfers] == [1]


def test_what_nobody_holds_is_named_with_its_box_and_rank() -> None:
    world = World({"a.weight": (4, 6)}, Side(3), Side(3))
    world.held.add(0, "a.weight", Box((0, 0), (4, 4)))
    world.wanted.add(2, "a.weight", Box.whole((4, 6)))
    world.wanted.add(1, "b.weight", Box.whole((2,)))
    with pytest.raises(PlanError, match="2 wanted tensors are held by no rank in full") as caught:
        make_plan(world.holdings, world.demand, 64)
    assert "a.weight [0, 4] + [4, 2], wanted by rank 2" in str(caught.value)
    assert "b.weight [0] + [2], wanted by rank 1" in str(caught.value)


def test_a_tensor_that_one_side_alone_has_is_named() -> None:
    pieces = [Piece(f"t{i:02}", Box.whole((2,)), View("x", 2 * i, (1,)), "float32") for i in range(30)]
    few, all_of_them = tuple(pieces[:3]), tuple(pieces)
    check_same_tensors({0: Holdings(few)}, {1: Demand(few)})
    with pytest.raises(PlanError, match="27 tensors are wanted by rollout ranks and no train rank holds them: ") as it:
        check_same_tensors({0: Holdings(few)}, {1: Demand(all_of_them)})
    assert str(it.value).endswith(": " + ", ".join(f"t{i:02}" for i in range(3, 23)))
    with pytest.raises(PlanError, match="27 tensors are trained and no rollout rank wants them: t03, "):
        check_same_tensors({0: Holdings(all_of_them)}, {1: Demand(few)})


def test_wanting_an_element_twice_is_refused() -> None:
    world = one_tensor((4, 6))
    world.wanted.add(1, "t", Box((1, 1), (1, 1)))
    with pytest.raises(PlanError, match="rank 1, t: 25 elements wanted, 25 arrive, 24 of them distinct"):
        check_coverage(make_plan(world.holdings, world.demand, 1 << 20), world.holdings, world.demand)


@RANDOM
@given(worlds(), st.integers(4, 200))
def test_the_order_of_dicts_does_not_matter(world: World, limit: int) -> None:
    """Every rank makes the plan by itself, so all must come to the same one."""
    plan = make_plan(world.holdings, world.demand, limit, 2)
    assert make_plan(world.holdings, world.demand, limit, 2) == plan
    holdings, demand = dict(reversed(world.holdings.items())), dict(reversed(world.demand.items()))
    assert make_plan(holdings, demand, limit, 2) == plan


def moved(piece: Piece, boxes: int = 0, offset: int = 0, stride: int = 0) -> Piece:
    box = replace(piece.box, start=tuple(a + boxes for a in piece.box.start))
    view = replace(piece.view, offset=piece.view.offset + offset, stride=tuple(s + stride for s in piece.view.stride))
    return replace(piece, box=box, view=view)


def plan_of(transfers: Sequence[Transfer]) -> Plan:
    """One bucket, and a message for each transfer that needs one: so that it is the transfers that are wrong."""
    moving = [t for t in transfers if not t.is_local]
    messages = tuple(Message(tag, t.src, t.dst, t.target.dtype, (t,)) for tag, t in enumerate(moving))
    return Plan((Bucket(tuple(transfers), messages),), 1 << 20)


def beside(piece: Piece) -> Piece:
    """The box one further on, at the place where it would be in the same memory."""
    return piece.part(moved(piece, boxes=1).box)


# Each breaks one transfer of a right plan.
MUTANTS: dict[str, Callable[[World, Transfer], list[Transfer]]] = {
    "removed": lambda world, t: [],
    "duplicated": lambda world, t: [t, t],
    "source box moved": lambda world, t: [replace(t, source=moved(t.source, boxes=1))],
    "target box moved": lambda world, t: [replace(t, target=moved(t.target, boxes=1))],
    "both boxes moved": lambda world, t: [replace(t, source=moved(t.source, boxes=1), target=moved(t.target, boxes=1))],
    "reads its neighbour": lambda world, t: [replace(t, source=beside(t.source))],
    "moves its neighbour": lambda world, t: [replace(t, source=beside(t.source), target=beside(t.target))],
    "reads elsewhere": lambda world, t: [replace(t, source=moved(t.source, offset=1000))],
    "lands elsewhere": lambda world, t: [replace(t, target=moved(t.target, offset=-1))],
    "reads other strides": lambda world, t: [replace(t, source=moved(t.source, stride=1))],
    "lands in other strides": lambda world, t: [replace(t, target=moved(t.target, stride=1))],
    "in another dtype": lambda world, t: [replace(t, target=replace(t.target, dtype="float64"))],
    "of another tensor": lambda world, t: [replace(t, source=replace(t.source, name="t9"))],
    "to a rank that is none": lambda world, t: [replace(t, dst=9)],
    "to another rank": lambda world, t: [replace(t, dst=(t.dst + 1) % len(world.held.pieces))],
    "from a rank that lacks it": lambda world, t: [replace(t, src=lacking(world, t))],
}


def lacking(world: World, t: Transfer) -> int:
    """A rank that does not hold all of what is transferred."""
    name, where = t.source.name, index(t.source.box)
    return next((r for r in world.held.pieces if not world.has(world.held, r, name)[where].all()), 9)


@pytest.mark.parametrize("mutant", MUTANTS)
@settings(max_examples=15, deadline=None)
@given(worlds(), st.data())
def test_a_broken_plan_is_refused(mutant: str, world: World, data: st.DataObject) -> None:
    plan = make_plan(world.holdings, world.demand, 64)
    transfers = list(plan.transfers)
    assume(transfers)
    at = data.draw(st.integers(0, len(transfers) - 1))
    changed = [*transfers[:at], *MUTANTS[mutant](world, transfers[at]), *transfers[at + 1 :]]
    assume(changed != transfers)  # a scalar's box cannot move, and one rank alone has no other
    with pytest.raises(PlanError, match=r"does not hold|does not want|would land|elements wanted"):
        check_coverage(plan_of(changed), world.holdings, world.demand)


def test_a_box_of_another_tensor_in_its_place_is_refused() -> None:
    world = World({}, Side(2), Side(2))
    for name in ("k_proj", "v_proj"):
        world.held.add(0, name, Box.whole((4, 6)))
        world.wanted.add(1, name, Box.whole((4, 6)))
    k, v = make_plan(world.holdings, world.demand, 1 << 20).transfers
    swapped = replace(k, source=v.source), replace(v, source=k.source)
    with pytest.raises(PlanError, match=r"v_proj .* would land as .*k_proj"):
        check_coverage(plan_of(swapped), world.holdings, world.demand)


@RANDOM
@given(worlds())
def test_messages_that_do_not_carry_the_transfers_are_refused(world: World) -> None:
    plan = make_plan(world.holdings, world.demand, 1 << 20)
    assume(list(plan.messages))
    (bucket,), (first, *others) = plan.buckets, plan.messages
    for broken in ([], [first, first], [replace(first, dst=first.dst + 1)], [replace(first, dtype="float64")]):
        with pytest.raises(PlanError, match="messages"):
            check_coverage(Plan((replace(bucket, messages=(*broken, *others)),), 1), world.holdings, world.demand)
