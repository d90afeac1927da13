"""The checks of a plan, against plans that are broken at one end of a transfer or at both."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hybrid3d.reshard.plan.box import Box
from hybrid3d.reshard.plan.coverage import check_arrivals, check_coverage
from hybrid3d.reshard.plan.layout import Demand, Piece
from hybrid3d.reshard.plan.planner import Bucket, Message, Plan, PlanError, RankPlan, Transfer, make_plan
from test_reshard_box import Side, World, index, transfers_of, worlds

FEW = settings(max_examples=15, deadline=None)
BROKEN = r"does not hold|does not want|elements wanted|once too often|has no part in"


def parts_of(transfers: Iterable[Transfer], ranks: Iterable[int]) -> dict[int, list[Transfer]]:
    """Return the transfers in which each rank takes part."""
    parts: dict[int, list[Transfer]] = {rank: [] for rank in ranks}
    for t in transfers:
        for rank in {t.src, t.dst}:
            parts.setdefault(rank, []).append(t)
    return parts


def plan_of(parts: Mapping[int, Sequence[Transfer]]) -> Plan:
    """Return a plan of one bucket with correct messages, so that only the transfers can be wrong."""
    plan = {}
    for rank, transfers in parts.items():
        remote = [t for t in transfers if not t.is_local]
        messages = tuple(Message(tag, t.src, t.dst, t.dtype, (t,)) for tag, t in enumerate(remote))
        plan[rank] = RankPlan(rank, (Bucket(0, None, tuple(transfers), messages),))
    return plan


def moved(piece: Piece, boxes: int = 0, offset: int = 0, stride: int = 0) -> Piece:
    view = replace(piece.view, offset=piece.view.offset + offset, stride=tuple(s + stride for s in piece.view.stride))
    return replace(piece, box=shifted(piece.box, boxes), view=view)


def shifted(box: Box, by: int = 1) -> Box:
    return replace(box, start=tuple(a + by for a in box.start))


def beside(piece: Piece) -> Piece:
    """Return the piece whose box is shifted by one element, at its location in the same memory."""
    return piece.restrict(shifted(piece.box))


def lacking(world: World, t: Transfer) -> int:
    """Return a rank that does not hold all elements of a transfer."""
    where = index(t.box)
    return next((r for r in world.held.pieces if not world.has(world.held, r, t.name)[where].all()), 9)


@dataclass(frozen=True)
class Mutant:
    """A change that breaks one transfer of a correct plan.

    Attributes:
        ends: the ends, `source` or `target`, at which the change alone already breaks the plan.
        mutate: returns the transfers that replace the given one.
    """

    ends: str
    mutate: Callable[[World, Transfer], list[Transfer]]


MUTANTS = {
    "removed": Mutant("source target", lambda w, t: []),
    "duplicated": Mutant("source target", lambda w, t: [t, t]),
    "box moved": Mutant("source target", lambda w, t: [replace(t, box=shifted(t.box))]),
    "source box moved": Mutant("source", lambda w, t: [replace(t, source=moved(t.source, boxes=1))]),
    "target box moved": Mutant("target", lambda w, t: [replace(t, target=moved(t.target, boxes=1))]),
    "all boxes moved": Mutant(
        "source target",
        lambda w, t: [replace(t, box=shifted(t.box), source=moved(t.source, boxes=1), target=moved(t.target, boxes=1))],
    ),
    "reads its neighbour": Mutant("source", lambda w, t: [replace(t, source=beside(t.source))]),
    "lands as its neighbour": Mutant("target", lambda w, t: [replace(t, target=beside(t.target))]),
    "moves its neighbour": Mutant(
        "source target",
        lambda w, t: [replace(t, box=shifted(t.box), source=beside(t.source), target=beside(t.target))],
    ),
    "reads elsewhere": Mutant("source", lambda w, t: [replace(t, source=moved(t.source, offset=1000))]),
    "lands elsewhere": Mutant("target", lambda w, t: [replace(t, target=moved(t.target, offset=-1))]),
    "reads other strides": Mutant("source", lambda w, t: [replace(t, source=moved(t.source, stride=1))]),
    "lands in other strides": Mutant("target", lambda w, t: [replace(t, target=moved(t.target, stride=1))]),
    "read in another dtype": Mutant("source", lambda w, t: [replace(t, source=replace(t.source, dtype="float64"))]),
    "lands in another dtype": Mutant("target", lambda w, t: [replace(t, target=replace(t.target, dtype="float64"))]),
    "sent in another dtype": Mutant("source target", lambda w, t: [replace(t, dtype="float64")]),
    "of another tensor": Mutant("source target", lambda w, t: [replace(t, name="t9")]),
    "reads another tensor": Mutant("source", lambda w, t: [replace(t, source=replace(t.source, name="t9"))]),
    "lands as another tensor": Mutant("target", lambda w, t: [replace(t, target=replace(t.target, name="t9"))]),
    "from nowhere": Mutant("source", lambda w, t: [replace(t, source=None)]),
    "to nowhere": Mutant("target", lambda w, t: [replace(t, target=None)]),
    "to a rank that is none": Mutant("source target", lambda w, t: [replace(t, dst=9)]),
    "to another rank": Mutant("source target", lambda w, t: [replace(t, dst=(t.dst + 1) % len(w.held.pieces))]),
    "from a rank that lacks it": Mutant("source target", lambda w, t: [replace(t, src=lacking(w, t))]),
}
CASES = [
    pytest.param(name, end, id=f"{name}-{end}")
    for name, mutant in MUTANTS.items()
    for end in ("both", *mutant.ends.split())
]


@pytest.mark.parametrize(("name", "end"), CASES)
@FEW
@given(worlds(), st.data())
def test_broken_plan_is_refused(name: str, end: str, world: World, data: st.DataObject) -> None:
    transfers = transfers_of(make_plan(world.holdings, world.demand, 64))
    assume(transfers)
    at = data.draw(st.integers(0, len(transfers) - 1))
    t = transfers[at]
    changed = [*transfers[:at], *MUTANTS[name].mutate(world, t), *transfers[at + 1 :]]
    assume(changed != transfers)  # a scalar's box cannot move, and one rank alone has no other
    right = parts_of(transfers, world.held.pieces)
    check_coverage(plan_of(right), world.holdings, world.demand)
    if end == "both":
        broken = parts_of(changed, world.held.pieces)
    else:
        rank = t.src if end == "source" else t.dst
        remote = {id(t) for t in transfers} - {id(t) for t in right[rank]}
        broken = right | {rank: [t for t in changed if id(t) not in remote]}
    with pytest.raises(PlanError, match=BROKEN):
        check_coverage(plan_of(broken), world.holdings, world.demand)


@FEW
@given(worlds())
def test_part_that_is_left_out_is_refused(world: World) -> None:
    plan = make_plan(world.holdings, world.demand, 64)
    for rank, part in plan.items():
        if part.buckets:
            with pytest.raises(PlanError, match=BROKEN):
                check_coverage({r: p for r, p in plan.items() if r != rank}, world.holdings, world.demand)
    if any(part.buckets for part in plan.values()):
        with pytest.raises(PlanError, match="elements wanted, 0 arrive"):
            check_coverage({}, world.holdings, world.demand)


@FEW
@given(worlds())
def test_transfer_between_others_is_refused(world: World) -> None:
    """A rank would otherwise receive what it should send."""
    transfers = transfers_of(make_plan(world.holdings, world.demand, 64))
    assume(transfers)
    parts = parts_of(transfers, [*world.held.pieces, 9])
    parts[9].append(transfers[0])
    with pytest.raises(PlanError, match="rank 9"):
        check_coverage(plan_of(parts), world.holdings, world.demand)


def two_equal_tensors() -> tuple[World, Transfer, Transfer]:
    world = World({}, Side(2), Side(2))
    for name in ("k_proj", "v_proj"):
        world.held.add(0, name, Box.full((4, 6)))
        world.wanted.add(1, name, Box.full((4, 6)))
    k, v = sorted(transfers_of(make_plan(world.holdings, world.demand, 1 << 20)), key=lambda t: t.name)
    return world, k, v


def test_box_of_another_tensor_in_its_place_is_refused() -> None:
    world, k, v = two_equal_tensors()
    read = replace(k, source=v.source), replace(v, source=k.source)
    with pytest.raises(PlanError, match="rank 0 does not hold k_proj"):
        check_coverage(plan_of(parts_of(read, (0, 1))), world.holdings, world.demand)
    written = replace(k, target=v.target), replace(v, target=k.target)
    with pytest.raises(PlanError, match="rank 1 does not want k_proj"):
        check_coverage(plan_of(parts_of(written, (0, 1))), world.holdings, world.demand)


@FEW
@given(worlds())
def test_check_arrivals_works_on_each_rank_s_own_plan(world: World) -> None:
    """In a run a rank has only its own plan, without the memory locations of other ranks."""
    for rank, part in make_plan(world.holdings, world.demand, 64).items():
        here = [replace(t, source=t.source if t.src == rank else None) for t in part.transfers if t.dst == rank]
        there = [replace(t, target=None) for t in part.transfers if rank == t.src != t.dst]
        check_arrivals(plan_of({rank: here + there})[rank], world.demand[rank])
        for at, t in enumerate(here):
            less, twice = here[:at] + here[at + 1 :], [*here, t]
            elsewhere = [*less, replace(t, target=moved(t.target, offset=1))]
            nowhere = [*less, replace(t, target=None)]
            for broken in (less, twice, elsewhere, nowhere):
                with pytest.raises(PlanError, match=BROKEN):
                    check_arrivals(plan_of({rank: broken + there})[rank], world.demand[rank])
        if here:
            with pytest.raises(PlanError, match="does not want"):
                check_arrivals(plan_of({rank: here + there})[rank], Demand(()))


@settings(max_examples=60, deadline=None)
@given(worlds())
def test_messages_that_do_not_carry_the_transfers_are_refused(world: World) -> None:
    plan = make_plan(world.holdings, world.demand, 1 << 20)
    sending = [(rank, b) for rank, part in plan.items() for b in part.buckets if b.messages]
    assume(sending)
    for rank, bucket in sending:
        first, *others = bucket.messages
        of_nothing = replace(first, transfers=())
        for broken in (
            [],
            [first, first],
            [of_nothing],
            [replace(first, dst=first.dst + 1)],
            [replace(first, src=first.src + 1)],
            [replace(first, dtype="float64")],
        ):
            spoiled = replace(bucket, messages=(*broken, *others))
            buckets = tuple(spoiled if b is bucket else b for b in plan[rank].buckets)
            for check in (
                lambda part: check_coverage({**plan, part.rank: part}, world.holdings, world.demand),
                lambda part: check_arrivals(part, world.demand[part.rank]),
            ):
                with pytest.raises(PlanError, match="messages"):
                    check(RankPlan(rank, buckets))
