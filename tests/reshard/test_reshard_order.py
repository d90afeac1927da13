"""The order of transfers, the boundaries of buckets, and plans that ranks compute separately."""

from __future__ import annotations

import itertools
import re
import threading
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid3d.reshard.plan.box import Box
from hybrid3d.reshard.plan.classes import Group, rank_groups, signature_of
from hybrid3d.reshard.plan.layout import ITEMSIZE, Demand, Holdings, LocalPieces
from hybrid3d.reshard.plan.order import Order
from hybrid3d.reshard.plan.planner import Bucket, Message, Plan, RankPlan, Routes, Transfer, make_plan
from test_reshard_box import Side, World, transfers_of, worlds
from worlds import run_in_threads

RANDOM = settings(max_examples=60, deadline=None)
NAMES = st.builds(
    "{}t{}".format, st.sampled_from(["", "layers.0.", "model.layers.2.", "layers.10."]), st.integers(0, 12)
)


def layer_in(name: str) -> int | None:
    """Return the layer in a name, without the function that is tested."""
    numbers = re.findall(r"layers\.(\d+)\.", name)
    return int(numbers[0]) if numbers else None


def by_layer(names: Iterable[str]) -> dict[int | None, list[str]]:
    """Group names by layer in numeric order, `None` last; within a layer, t2 comes before t10."""
    found: dict[int | None, list[str]] = defaultdict(list)
    for name in sorted(names, key=lambda name: int(name.rpartition("t")[2])):
        found[layer_in(name)].append(name)
    return {layer: found[layer] for layer in sorted(found, key=lambda n: 1 << 30 if n is None else n)}


def rotations(sequence: Sequence) -> list[list]:
    return [[*sequence[at:], *sequence[:at]] for at in range(len(sequence))]


def transferred_bytes(t: Transfer) -> int:
    return 0 if t.src == t.dst else t.target.box.numel * ITEMSIZE[t.target.dtype]


STAGES = st.fixed_dictionaries({None: st.just(0), 0: st.integers(0, 2), 2: st.integers(0, 2), 10: st.integers(0, 2)})


@RANDOM
@given(st.sets(NAMES, min_size=1), st.sets(st.integers(-1, 40), min_size=1, max_size=8), STAGES)
def test_keys_are_unique_and_rounds_are_the_reader_s_layers(names: set[str], readers: set[int], stages) -> None:
    order, layers = Order(names, readers, stages), by_layer(names)
    keys = {order.key(*of): of for of in itertools.product(names, readers, range(3))}
    assert len(keys) == len(names) * len(readers) * 3
    assert all(0 <= key < order.end == len(layers) * order.round for key in keys)
    for reader in readers:
        assert reader in order
        mine = [(key, name, part) for key, (name, dst, part) in sorted(keys.items()) if dst == reader]
        taken = [layer for layer, _ in itertools.groupby(layer_in(name) for _, name, _ in mine)]
        assert sorted(map(repr, taken)) == sorted(map(repr, layers))
        assert None not in taken[:-1]
        places = [place_in_stage(layer, layers, stages) for layer in taken if layer is not None]
        assert places == sorted(places)  # no stage's second layer before another's first
        for turn, layer in enumerate(taken):
            assert [order.layer(reader, at) for at in (turn * order.round, (turn + 1) * order.round - 1)] == [layer] * 2
            parts = [(name, part) for key, name, part in mine if key // order.round == turn]
            turns = [[(name, part) for name in found for part in range(3)] for found in rotations(layers[layer])]
            assert parts in turns
    assert max(readers) + 1 not in order


def place_in_stage(layer: int, layers: Iterable[int | None], stages: Mapping[int | None, int]) -> int:
    return sum(other < layer and stages[other] == stages[layer] for other in layers if other is not None)


@RANDOM
@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 12), st.integers(1, 3))
def test_readers_begin_at_different_stages_and_at_different_tensors(
    stages: int, tensors: int, readers: int, each: int
) -> None:
    """If there are fewer stages or tensors than readers, as few readers as possible start at the same one."""
    names = [f"layers.{layer}.t{i}" for layer in range(stages * each) for i in range(tensors)]
    order = Order(names, range(5, 5 + readers), {layer: layer // each for layer in range(stages * each)})
    for candidates, count in ((names, stages), ([f"layers.0.t{i}" for i in range(tensors)], tensors)):
        first = [min(candidates, key=lambda name: order.key(name, reader, 0)) for reader in range(5, 5 + readers)]
        begins = Counter(map(layer_in, first)) if candidates is names else Counter(first)
        assert max(begins.values()) == -(-readers // count)
        assert len(begins) == min(readers, count)


def test_readers_take_first_layers_of_all_stages_before_second_ones() -> None:
    world = World({}, Side(5), Side(5))
    for layer, holder in (("layers.0.", 4), ("layers.1.", 4), ("layers.2.", 3), ("layers.10.", 3), ("", 4)):
        world.held.add(holder, f"{layer}t0", Box.full((4,)))
        for rank in range(4):
            world.wanted.add(rank, f"{layer}t0", Box.full((4,)))
    plan = make_plan(world.holdings, {rank: world.demand[rank] for rank in range(4)}, 1 << 20)
    first, second = [2, 0, 10, 1, None], [0, 2, 1, 10, None]
    assert [plan[rank].layers for rank in range(4)] == [first, first, second, second]
    assert plan[4].layers == []  # takes nothing, and gives to some of them in each round
    assert [[layer_in(t.name) for t in b.transfers] for b in plan[4].buckets] == [
        [0, 0], [0, 0], [1, 1], [1, 1], [None] * 4
    ]  # fmt: skip
    assert [bucket.number for bucket in plan[4].buckets] == list(range(5))
    assert {bucket.layer for bucket in plan[4].buckets} == {None}


@RANDOM
@given(worlds(), st.integers(4, 100), st.integers(1, 3), st.booleans())
def test_transfers_have_one_key_of_their_own_at_both_ends(
    world: World, limit: int, per_node: int, relays: bool
) -> None:
    routes = Routes(rank_groups(world.holdings), rank_groups(world.demand), limit, per_node, relays)
    pieces, at = LocalPieces(world.holdings, world.demand), defaultdict[int, set[Transfer]](set)
    for rank in world.held.pieces:
        keyed = routes.rank_transfers(rank, pieces)
        keys = [key for key, _ in keyed]
        assert all(a < b for a, b in itertools.pairwise(keys))
        for key, t in keyed:
            at[key].add(t)
    assert all(len(transfers) == 1 for transfers in at.values())
    plan = make_plan(world.holdings, world.demand, limit, per_node, relays)
    assert sorted(map(repr, transfers_of(plan))) == sorted(repr(t) for (t,) in at.values())


@RANDOM
@given(worlds(), st.integers(4, 100))
def test_rank_takes_layers_in_turn_and_one_in_a_bucket(world: World, limit: int) -> None:
    for rank, part in make_plan(world.holdings, world.demand, limit).items():
        taken = [layer_in(t.name) for t in part.transfers if t.dst == rank]
        in_turn = [layer for layer, _ in itertools.groupby(taken)]
        assert len(set(in_turn)) == len(in_turn)
        assert part.layers == in_turn
        for bucket in part.buckets:
            assert {layer_in(t.name) for t in bucket.transfers if t.dst == rank} <= {bucket.layer}


@RANDOM
@given(worlds(), st.integers(4, 100), st.integers(1, 3))
def test_buckets_end_at_same_keys_everywhere_and_none_too_early(world: World, limit: int, per_node: int) -> None:
    """A bucket ends with its round, or before a transfer that would exceed the limit on some rank."""
    routes = Routes(rank_groups(world.holdings), rank_groups(world.demand), limit, per_node)
    pieces = LocalPieces(world.holdings, world.demand)
    transfers = {rank: routes.rank_transfers(rank, pieces) for rank in world.held.pieces}
    bucket_boundaries = routes.bucket_boundaries(transfers.values())
    plan = make_plan(world.holdings, world.demand, limit, per_node)
    for rank, keyed in transfers.items():
        buckets = itertools.groupby(keyed, lambda keyed_transfer: bisect_right(bucket_boundaries, keyed_transfer[0]))
        assert [list(b.transfers) for b in plan[rank].buckets] == [[t for _, t in bucket] for _, bucket in buckets]
    wanted = {p.name for side in world.wanted.pieces.values() for p in side}
    order = Order(wanted, world.wanted.pieces, dict.fromkeys(map(layer_in, wanted), 0))
    assert [0, *bucket_boundaries] == sorted({0, *bucket_boundaries})
    assert max(bucket_boundaries, default=0) == order.end
    for begin, end in itertools.pairwise([0, *bucket_boundaries]):
        assert begin // order.round == (end - 1) // order.round
        full = []
        for keyed in transfers.values():
            load = sum(transferred_bytes(t) for key, t in keyed if begin <= key < end)
            assert load <= limit
            following = [transferred_bytes(t) for key, t in keyed if key == end]
            full.append(any(load + nbytes > limit for nbytes in following))
        assert end % order.round == 0 or any(full)


@RANDOM
@given(worlds(), st.integers(4, 100))
def test_buckets_do_not_exceed_the_limit_on_any_rank(world: World, limit: int) -> None:
    for part in make_plan(world.holdings, world.demand, limit).values():
        for bucket in part.buckets:
            assert sum(map(transferred_bytes, bucket.transfers)) <= limit


def messages_between(plan: Plan, rank: int, pair: tuple[int, int]) -> list[list[tuple]]:
    """Return, by bucket, everything about the messages from one rank to another that both ends must agree on."""
    found = [
        [
            (m.tag, m.dtype, m.nbytes, [(t.name, t.box, t.nbytes) for t in m.transfers])
            for m in bucket.messages
            if (m.src, m.dst) == pair
        ]
        for bucket in plan[rank].buckets
    ]
    return [messages for messages in found if messages]


@RANDOM
@given(worlds(), st.integers(4, 100))
def test_planned_messages_are_the_same_at_both_ends(world: World, limit: int) -> None:
    plan = make_plan(world.holdings, world.demand, limit)
    for src, dst in itertools.permutations(plan, 2):
        messages = messages_between(plan, src, (src, dst))
        assert messages == messages_between(plan, dst, (src, dst))
        tags = [tag for bucket in messages for tag, *_ in bucket]
        assert tags == list(range(len(tags)))


class ThreadAllReduceMin:
    """An all-reduce MIN of one number between threads."""

    def __init__(self, ranks: int):
        self._numbers: list[int] = []
        self._all = threading.Barrier(ranks, self._reduce, timeout=60)

    def _reduce(self) -> None:
        self._minimum = min(self._numbers)
        self._numbers.clear()

    def __call__(self, number: int) -> int:
        self._numbers.append(number)
        self._all.wait()
        return self._minimum

    def abort(self) -> None:
        self._all.abort()


def in_groups(sides: dict[int, Holdings] | dict[int, Demand]) -> list[Group]:
    """Group ranks with equal signatures, as the ranks of a run learn of each other."""
    found: dict[str, Group] = {}
    for rank, side in sides.items():
        signature = signature_of(side)
        ranks, _ = found.setdefault(repr(signature), ([], signature))
        ranks.append(rank)
    return list(found.values())


def plan_of_rank(
    world: World, rank: int, limit: int, per_node: int, relays: bool, all_reduce_min: ThreadAllReduceMin
) -> RankPlan:
    """Return a rank's plan as it computes it in a run: from its own pieces and the signatures of all ranks."""
    try:
        held, wanted = {rank: world.holdings[rank]}, {rank: world.demand[rank]}
        routes = Routes(in_groups(world.holdings), in_groups(world.demand), limit, per_node, relays)
        transfers = routes.rank_transfers(rank, LocalPieces(held, wanted))
        return routes.plan(rank, transfers, routes.bucket_boundaries([transfers], all_reduce_min))
    except BaseException:
        all_reduce_min.abort()
        raise


def without_remote_pieces(rank: int, part: RankPlan) -> RankPlan:
    """Remove the pieces at the other ends of the transfers, whose locations a rank does not know."""

    def its(t: Transfer) -> Transfer:
        return replace(t, source=t.source if t.src == rank else None, target=t.target if t.dst == rank else None)

    def message(m: Message) -> Message:
        return replace(m, transfers=tuple(map(its, m.transfers)))

    def bucket(b: Bucket) -> Bucket:
        return replace(b, transfers=tuple(map(its, b.transfers)), messages=tuple(map(message, b.messages)))

    return replace(part, buckets=tuple(map(bucket, part.buckets)))


@settings(max_examples=100, deadline=None)
@given(worlds(), st.integers(4, 200), st.integers(1, 3), st.booleans())
def test_ranks_each_compute_their_part_of_the_same_plan(world: World, limit: int, per_node: int, relays: bool) -> None:
    plan, ranks = make_plan(world.holdings, world.demand, limit, per_node, relays), list(world.held.pieces)
    all_reduce_min = ThreadAllReduceMin(len(ranks))
    own = run_in_threads(lambda rank: plan_of_rank(world, rank, limit, per_node, relays, all_reduce_min), ranks)
    assert own == [without_remote_pieces(rank, plan[rank]) for rank in ranks]
    for rank, part in zip(ranks, own, strict=True):
        assert part.staging_bytes == plan[rank].staging_bytes
        assert (part.received_bytes, part.sent_bytes) == (plan[rank].received_bytes, plan[rank].sent_bytes)
