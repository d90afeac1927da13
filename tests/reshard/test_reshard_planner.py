"""Plans over random layouts, checked by counting elements, without the library's own checks.

The order of transfers is tested in `test_reshard_order.py`.
"""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid3d.reshard.plan.box import Box
from hybrid3d.reshard.plan.classes import rank_groups
from hybrid3d.reshard.plan.coverage import check_coverage, check_same_tensors, lower_bound
from hybrid3d.reshard.plan.layout import FILES, ITEMSIZE, Demand, Holdings, Piece, View
from hybrid3d.reshard.plan.planner import DIRECT_BYTES, PlanError, Transfer, local_plan, make_plan
from test_reshard_box import Shape, Side, World, addresses, check_moves, index, transfers_of, worlds

RANDOM = settings(max_examples=60, deadline=None)


@RANDOM
@given(worlds(), st.integers(4, 200))
def test_plan_lands_every_wanted_element_once_from_a_holder(world: World, limit: int) -> None:
    plan = make_plan(world.holdings, world.demand, limit)
    check_moves(world, plan)
    check_coverage(plan, world.holdings, world.demand)


@RANDOM
@given(worlds(), st.integers(4, 200), st.integers(1, 3))
def test_received_bytes_are_the_lower_bound(world: World, limit: int, ranks_per_node: int) -> None:
    plan = make_plan(world.holdings, world.demand, limit, ranks_per_node)
    bound = lower_bound(world.holdings, world.demand)
    moved = Counter[tuple[int, int]]()
    for t in transfers_of(plan):
        moved[t.src, t.dst] += t.target.box.numel * ITEMSIZE[t.target.dtype]
    for rank in world.wanted.pieces:
        received = sum(nbytes for (src, dst), nbytes in moved.items() if dst == rank != src)
        assert plan[rank].received_bytes == received == bound[rank] == world.must_receive(rank)
        assert plan[rank].sent_bytes == sum(nbytes for (src, dst), nbytes in moved.items() if src == rank != dst)
        wanted = sum(p.box.numel * ITEMSIZE[p.dtype] for p in world.wanted.pieces[rank])
        assert plan[rank].local_bytes == moved[rank, rank] == wanted - bound[rank]
        assert lower_bound({rank: world.holdings[rank]}, {rank: world.demand[rank]}) == {rank: bound[rank]}


@RANDOM
@given(worlds(), st.integers(1, 3))
def test_nearest_rank_that_holds_an_element_gives_it(world: World, ranks_per_node: int) -> None:
    for t in transfers_of(make_plan(world.holdings, world.demand, 64, ranks_per_node)):
        holds = {r: world.has(world.held, r, t.name)[index(t.box)].any() for r in world.held.pieces}
        if t.src != t.dst:
            assert not holds[t.dst]
        if t.src // ranks_per_node != t.dst // ranks_per_node:
            assert not any(held for r, held in holds.items() if r // ranks_per_node == t.dst // ranks_per_node)


@RANDOM
@given(st.integers(2, 5), st.lists(st.integers(1, 30), min_size=1, max_size=25))
def test_replicas_share_the_sending(replicas: int, rows: list[int]) -> None:
    """The rank that has sent least sends next, so two replicas never differ by more than the largest piece."""
    held, wanted = Side(replicas + 1), Side(replicas + 1)
    for i, n in enumerate(rows):
        wanted.add(replicas, f"t{i}", Box.full((n, 2)), "float32")
        for rank in range(replicas):
            held.add(rank, f"t{i}", Box.full((n, 2)), "float32")
    world = World({f"t{i}": (n, 2) for i, n in enumerate(rows)}, held, wanted)
    plan = make_plan(world.holdings, world.demand, 64)
    each = [plan[rank].sent_bytes for rank in range(replicas)]
    assert sum(each) == sum(rows) * 8
    assert max(each) - min(each) <= max(rows) * 8


@RANDOM
@given(worlds(), st.integers(4, 100))
def test_messages_carry_remote_transfers_and_staging_is_what_they_pack(world: World, limit: int) -> None:
    for rank, part in make_plan(world.holdings, world.demand, limit).items():
        tags: dict[tuple[int, int], list[int]] = {}
        for bucket in part.buckets:
            assert bucket.transfers
            carried = Counter(t for m in bucket.messages for t in m.transfers)
            assert carried == Counter(t for t in bucket.transfers if t.src != t.dst)
            for m in bucket.messages:
                assert {(t.src, t.dst, t.target.dtype) for t in m.transfers} == {(m.src, m.dst, m.dtype)}
                tags.setdefault((m.src, m.dst), []).append(m.tag)
            kinds = [(m.src, m.dst, m.dtype) for m in bucket.messages]
            assert len(set(kinds)) == len(kinds), "small boxes that could go together"
        assert all(of_pair == list(range(len(of_pair))) for of_pair in tags.values())
        staged = [sum(staging(m.transfers, rank) for m in bucket.messages) for bucket in part.buckets]
        assert part.staging_bytes == (max(staged[0::2], default=0), max(staged[1::2], default=0))
        assert max(part.staging_bytes) <= limit


def staging(transfers: tuple[Transfer, ...], rank: int) -> int:
    """Return the bytes that a rank packs or unpacks: all except a single box that is sent or received directly."""
    (t, *more) = transfers
    end = t.source if rank == t.src else t.target
    runs = (addresses(end).ravel() == end.view.offset + np.arange(end.box.numel)).all()
    ready = end.dtype == t.target.dtype
    return 0 if runs and ready and not more else sum(t.target.box.numel * ITEMSIZE[t.target.dtype] for t in transfers)


def sharded(side: Side, name: str, shape: Shape, dim: int, ranks: list[int], shards: int) -> None:
    """Shard a tensor along a dim over ranks in turn; if there are more ranks than shards, they are replicas."""
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
    assert [plan[rank].received_bytes for rank in range(4)] == received
    assert [lower_bound(world.holdings, world.demand)[rank] for rank in range(4)] == received
    check_moves(world, plan)


def one_tensor(shape: Shape) -> World:
    """Return a world in which rank 0 holds a tensor that rank 1 wants."""
    world = World({"t": shape}, Side(2), Side(2))
    world.held.add(0, "t", Box.full(shape))
    world.wanted.add(1, "t", Box.full(shape))
    return world


def test_box_larger_than_a_bucket_is_cut_into_row_runs() -> None:
    plan = make_plan(one_tensor((10, 6)).holdings, one_tensor((10, 6)).demand, 29 * 4)
    for rank in (0, 1):
        sizes = [[t.target.box.size for t in bucket.transfers] for bucket in plan[rank].buckets]
        assert sizes == [[(4, 6)], [(4, 6)], [(2, 6)]]


def test_large_boxes_travel_alone_and_small_ones_together() -> None:
    world, rows = World({}, Side(2), Side(2)), DIRECT_BYTES // 4
    sizes = {"a": rows - 1, "b": rows, "c": 3, "d": rows + 1, "e": 2 * rows}
    for name, n in sizes.items():
        strided = 1 if name in "ae" else 0
        world.held.add(0, name, Box.full((n, 1)), gap=strided)
        world.wanted.add(1, name, Box.full((n, 1)), gap=strided if name == "a" else 0)
    plan = make_plan(world.holdings, world.demand, 1 << 30)
    for rank in (0, 1):
        (bucket,) = plan[rank].buckets
        names = {tuple(sorted(t.name for t in m.transfers)) for m in bucket.messages}
        assert names == {("a", "c"), ("b",), ("d",), ("e",)}
        assert len(bucket.messages) == 4
    together = (sizes["a"] + sizes["c"]) * 4
    assert plan[0].staging_bytes == (together + sizes["e"] * 4, 0)  # what is strided is packed, be it alone
    assert plan[1].staging_bytes == (together, 0)


def test_files_at_one_end_are_local_and_memory_comes_first() -> None:
    world = one_tensor((4, 2))
    (piece,) = world.held.pieces[0]
    load = make_plan({FILES: Holdings((piece,))}, {**world.demand, 0: Demand(())}, 4)
    export = make_plan(world.holdings, {FILES: Demand((piece,))}, 4)
    assert lower_bound(world.holdings, {FILES: Demand((piece,))}) == {FILES: 0}
    for plan, src, dst in ((load, FILES, 1), (export, 0, FILES)):
        assert [(t.src, t.dst, t.is_local) for t in transfers_of(plan)] == [(src, dst, True)]
        for rank, part in plan.items():
            assert not any(bucket.messages for bucket in part.buckets)
            assert part.local_bytes == (32 if rank in (src, dst) else 0)
            assert part.received_bytes == part.sent_bytes == sum(part.staging_bytes) == 0
    both = make_plan({FILES: Holdings((piece,)), 1: Holdings((piece,))}, world.demand, 4)
    assert [t.src for t in transfers_of(both)] == [1]


@RANDOM
@given(worlds())
def test_load_or_export_is_each_rank_s_part_of_plan(world: World) -> None:
    everything = Holdings(tuple(p for pieces in world.held.pieces.values() for p in pieces))
    load = {FILES: everything}, world.demand
    export = world.holdings, {FILES: Demand(world.holdings[0].pieces)}
    for holdings, demand in (load, export):
        plan = make_plan(holdings, demand, 4)
        assert {rank: local_plan(rank, holdings, demand) for rank in plan} == plan
    assert all(t.is_local for part in plan.values() for t in part.transfers)


def test_local_plan_refuses_what_would_travel() -> None:
    world = one_tensor((4, 2))
    for rank in (0, 1):
        with pytest.raises(ValueError, match="a bucket of 0 bytes holds no element of 4 bytes"):
            local_plan(rank, world.holdings, world.demand)


def test_unheld_tensors_are_named_with_box_and_rank() -> None:
    world = World({"a.weight": (4, 6)}, Side(3), Side(3))
    world.held.add(0, "a.weight", Box((0, 0), (4, 4)))
    world.wanted.add(2, "a.weight", Box.full((4, 6)))
    world.wanted.add(1, "b.weight", Box.full((2,)))
    with pytest.raises(PlanError, match="2 wanted tensors are held by no rank in full") as caught:
        make_plan(world.holdings, world.demand, 64)
    assert "a.weight [0, 4] + [4, 2], wanted by rank 2" in str(caught.value)
    assert "b.weight [0] + [2], wanted by rank 1" in str(caught.value)


def test_tensor_that_one_side_alone_has_is_named() -> None:
    pieces = [Piece(f"t{i:02}", Box.full((2,)), View("x", 2 * i, (1,)), "float32") for i in range(30)]
    few, all_of_them = Holdings(tuple(pieces[:3])), Holdings(tuple(pieces))
    wants_few, wants_all = Demand(few.pieces), Demand(all_of_them.pieces)
    check_same_tensors(rank_groups({0: few}), rank_groups({1: wants_few}))
    parts = {rank: Holdings(tuple(pieces[rank::3])) for rank in range(3)}
    check_same_tensors(rank_groups(parts), rank_groups({1: wants_few, 4: wants_all}))
    with pytest.raises(PlanError, match="27 tensors are wanted by rollout ranks and held by no train rank: ") as it:
        check_same_tensors(rank_groups({0: few}), rank_groups({1: wants_all}))
    assert str(it.value).endswith(": " + ", ".join(f"t{i:02}" for i in range(3, 23)))
    with pytest.raises(PlanError, match="27 tensors are held by train ranks and wanted by no rollout rank: t03, "):
        check_same_tensors(rank_groups({0: all_of_them}), rank_groups({1: wants_few}))


def test_wanting_an_element_twice_is_refused() -> None:
    world = one_tensor((4, 6))
    world.wanted.add(1, "t", Box((1, 1), (1, 1)))
    with pytest.raises(PlanError, match="rank 1, t: 25 elements wanted, 25 arrive, 24 of them distinct"):
        check_coverage(make_plan(world.holdings, world.demand, 1 << 20), world.holdings, world.demand)


@RANDOM
@given(worlds(), st.integers(4, 200))
def test_order_of_dicts_does_not_matter(world: World, limit: int) -> None:
    """Every rank computes the plan separately, so the result must not depend on the order of inputs."""
    plan = make_plan(world.holdings, world.demand, limit, 2)
    assert make_plan(world.holdings, world.demand, limit, 2) == plan
    holdings, demand = dict(reversed(world.holdings.items())), dict(reversed(world.demand.items()))
    assert make_plan(holdings, demand, limit, 2) == plan
