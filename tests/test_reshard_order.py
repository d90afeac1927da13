"""When transfers go: the order that all ranks count alike, buckets that end alike, and parts that ranks make alone."""

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

from hybrid3d.reshard.box import Box
from hybrid3d.reshard.classes import Group, rank_groups, signature_of
from hybrid3d.reshard.layout import ITEMSIZE, Demand, Holdings
from hybrid3d.reshard.order import Order
from hybrid3d.reshard.planner import Bucket, LocalPieces, Message, Plan, RankPlan, Routes, Transfer, make_plan
from test_reshard_box import Side, World, transfers_of, worlds
from worlds import run_in_threads

RANDOM = settings(max_examples=60, deadline=None)
NAMES = st.builds(
    "{}t{}".format, st.sampled_from(["", "layers.0.", "model.layers.2.", "layers.10."]), st.integers(0, 12)
)


def layer_in(name: str) -> int | None:
    """Said without the library's own words for it."""
    numbers = re.findall(r"layers\.(\d+)\.", name)
    return int(numbers[0]) if numbers else None


def by_layer(names: Iterable[str]) -> dict[int | None, list[str]]:
    """Layers by number, then what is in none; in each of them t2 before t10."""
    found: dict[int | None, list[str]] = defaultdict(list)
    for name in sorted(names, key=lambda name: int(name.rpartition("t")[2])):
        found[layer_in(name)].append(name)
    return {layer: found[layer] for layer in sorted(found, key=lambda n: 1 << 30 if n is None else n)}


def rotations(sequence: Sequence) -> list[list]:
    return [[*sequence[at:], *sequence[:at]] for at in range(len(sequence))]


def moved_bytes(t: Transfer) -> int:
    return 0 if t.src == t.dst else t.target.box.numel * ITEMSIZE[t.target.dtype]


STAGES = st.fixed_dictionaries({None: st.just(0), 0: st.integers(0, 2), 2: st.integers(0, 2), 10: st.integers(0, 2)})


@RANDOM
@given(st.sets(NAMES, min_size=1), st.sets(st.integers(-1, 40), min_size=1, max_size=8), STAGES)
def test_keys_are_unique_and_each_reader_s_rounds_are_its_layers(names: set[str], readers: set[int], stages) -> None:
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
    """As far as there are enough of them: else as few as can be begin at the same."""
    names = [f"layers.{layer}.t{i}" for layer in range(stages * each) for i in range(tensors)]
    order = Order(names, range(5, 5 + readers), {layer: layer // each for layer in range(stages * each)})
    for those, count in ((names, stages), ([f"layers.0.t{i}" for i in range(tensors)], tensors)):
        first = [min(those, key=lambda name: order.key(name, reader, 0)) for reader in range(5, 5 + readers)]
        begins = Counter(map(layer_in, first)) if those is names else Counter(first)
        assert max(begins.values()) == -(-readers // count)
        assert len(begins) == min(readers, count)


def test_readers_take_the_first_layers_of_all_stages_before_the_second_ones() -> None:
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
@given(worlds(), st.integers(4, 100), st.integers(1, 3))
def test_both_ends_have_a_transfer_under_one_key_of_its_own(world: World, limit: int, per_node: int) -> None:
    routes = Routes(rank_groups(world.holdings), rank_groups(world.demand), limit, per_node)
    known, at = LocalPieces(world.holdings, world.demand), defaultdict[int, set[Transfer]](set)
    for rank in world.held.pieces:
        moves = routes.rank_transfers(rank, known)
        keys = [key for key, _ in moves]
        assert all(a < b for a, b in itertools.pairwise(keys))
        for key, t in moves:
            at[key].add(t)
    assert all(len(transfers) == 1 for transfers in at.values())
    plan = make_plan(world.holdings, world.demand, limit, per_node)
    assert sorted(map(repr, transfers_of(plan))) == sorted(repr(t) for (t,) in at.values())


@RANDOM
@given(worlds(), st.integers(4, 100))
def test_a_rank_takes_one_layer_after_another_and_one_in_a_bucket(world: World, limit: int) -> None:
    for rank, part in make_plan(world.holdings, world.demand, limit).items():
        taken = [layer_in(t.name) for t in part.transfers if t.dst == rank]
        in_turn = [layer for layer, _ in itertools.groupby(taken)]
        assert len(set(in_turn)) == len(in_turn)
        assert part.layers == in_turn
        for bucket in part.buckets:
            assert {layer_in(t.name) for t in bucket.transfers if t.dst == rank} <= {bucket.layer}


@RANDOM
@given(worlds(), st.integers(4, 100), st.integers(1, 3))
def test_buckets_end_at_the_same_keys_on_all_ranks_and_none_too_early(world: World, limit: int, per_node: int) -> None:
    """A bucket ends with its round, or before a transfer that some rank has no room for."""
    routes = Routes(rank_groups(world.holdings), rank_groups(world.demand), limit, per_node)
    known = LocalPieces(world.holdings, world.demand)
    moves = {rank: routes.rank_transfers(rank, known) for rank in world.held.pieces}
    bucket_boundaries = routes.bucket_boundaries(moves.values())
    plan = make_plan(world.holdings, world.demand, limit, per_node)
    for rank, mine in moves.items():
        buckets = itertools.groupby(mine, lambda move: bisect_right(bucket_boundaries, move[0]))
        assert [list(b.transfers) for b in plan[rank].buckets] == [[t for _, t in those] for _, those in buckets]
    wanted = {p.name for side in world.wanted.pieces.values() for p in side}
    order = Order(wanted, world.wanted.pieces, dict.fromkeys(map(layer_in, wanted), 0))
    assert [0, *bucket_boundaries] == sorted({0, *bucket_boundaries})
    assert max(bucket_boundaries, default=0) == order.end
    for begin, end in itertools.pairwise([0, *bucket_boundaries]):
        assert begin // order.round == (end - 1) // order.round
        full = []
        for mine in moves.values():
            load = sum(moved_bytes(t) for key, t in mine if begin <= key < end)
            assert load <= limit
            following = [moved_bytes(t) for key, t in mine if key == end]
            full.append(any(load + nbytes > limit for nbytes in following))
        assert end % order.round == 0 or any(full)


@RANDOM
@given(worlds(), st.integers(4, 100))
def test_on_no_rank_more_goes_in_a_bucket_than_it_may(world: World, limit: int) -> None:
    for part in make_plan(world.holdings, world.demand, limit).values():
        for bucket in part.buckets:
            assert sum(map(moved_bytes, bucket.transfers)) <= limit


def said(plan: Plan, rank: int, pair: tuple[int, int]) -> list[list[tuple]]:
    """Of the messages between two ranks all that must be alike at both ends, by bucket."""
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
def test_both_ends_of_a_pair_say_the_same_of_their_messages(world: World, limit: int) -> None:
    plan = make_plan(world.holdings, world.demand, limit)
    for src, dst in itertools.permutations(plan, 2):
        messages = said(plan, src, (src, dst))
        assert messages == said(plan, dst, (src, dst))
        tags = [tag for bucket in messages for tag, *_ in bucket]
        assert tags == list(range(len(tags)))


class Agreement:
    """The least of what several threads say, each time that all have said something."""

    def __init__(self, ranks: int):
        self._said: list[int] = []
        self._all = threading.Barrier(ranks, self._settle, timeout=60)

    def _settle(self) -> None:
        self._least = min(self._said)
        self._said.clear()

    def __call__(self, number: int) -> int:
        self._said.append(number)
        self._all.wait()
        return self._least

    def abort(self) -> None:
        self._all.abort()


def in_groups(sides: dict[int, Holdings] | dict[int, Demand]) -> list[Group]:
    """Outlines that are equal, once, with the ranks that have them: what ranks of a run know of each other."""
    found: dict[str, Group] = {}
    for rank, side in sides.items():
        signature = signature_of(side)
        ranks, _ = found.setdefault(repr(signature), ([], signature))
        ranks.append(rank)
    return list(found.values())


def own_part(world: World, rank: int, limit: int, per_node: int, agree: Agreement) -> RankPlan:
    """A rank's part as the rank makes it, of what it has itself and what the others say of theirs."""
    try:
        held, wanted = {rank: world.holdings[rank]}, {rank: world.demand[rank]}
        routes = Routes(in_groups(world.holdings), in_groups(world.demand), limit, per_node)
        moves = routes.rank_transfers(rank, LocalPieces(held, wanted))
        return routes.plan(rank, moves, routes.bucket_boundaries([moves], agree))
    except BaseException:
        agree.abort()
        raise


def known_by(rank: int, part: RankPlan) -> RankPlan:
    """Without the places at the other ends, which a rank does not know."""

    def its(t: Transfer) -> Transfer:
        return replace(t, source=t.source if t.src == rank else None, target=t.target if t.dst == rank else None)

    def message(m: Message) -> Message:
        return replace(m, transfers=tuple(map(its, m.transfers)))

    def bucket(b: Bucket) -> Bucket:
        return replace(b, transfers=tuple(map(its, b.transfers)), messages=tuple(map(message, b.messages)))

    return replace(part, buckets=tuple(map(bucket, part.buckets)))


@settings(max_examples=100, deadline=None)
@given(worlds(), st.integers(4, 200), st.integers(1, 3))
def test_a_rank_alone_makes_its_part_of_the_one_plan(world: World, limit: int, per_node: int) -> None:
    plan, ranks = make_plan(world.holdings, world.demand, limit, per_node), list(world.held.pieces)
    agree = Agreement(len(ranks))
    own = run_in_threads(lambda rank: own_part(world, rank, limit, per_node, agree), ranks)
    assert own == [known_by(rank, plan[rank]) for rank in ranks]
    for rank, part in zip(ranks, own, strict=True):
        assert part.staging_bytes == plan[rank].staging_bytes
        assert (part.received_bytes, part.sent_bytes) == (plan[rank].received_bytes, plan[rank].sent_bytes)
