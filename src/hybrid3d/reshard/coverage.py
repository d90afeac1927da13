"""Checks that a plan is right before it runs, and counts its lower bound, each without the planner's own code."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Mapping

from hybrid3d.reshard.box import Box, union_numel
from hybrid3d.reshard.classes import Group, group_ranks, rank_groups
from hybrid3d.reshard.layout import ITEMSIZE, Demand, Holdings, Piece, pieces_by_name
from hybrid3d.reshard.planner import FILES, Plan, PlanError, RankPlan, Transfer
from hybrid3d.reshard.routes import Route, RoutedClass


def check_coverage(plan: Plan, holdings: Mapping[int, Holdings], demand: Mapping[int, Demand]) -> None:
    """Every wanted element arrives exactly once, at its place, from a rank that holds it, and nothing else moves.

    Raises:
        PlanError: with the first violation found.
    """
    there, held = (
        Counter[tuple[int, int, str, Box, str]](),
        {r: pieces_by_name(of.pieces) for r, of in holdings.items()},
    )
    for rank, part in plan.items():
        for t in part.transfers:
            if t.src == rank:
                _check_end(t, t.source, held.get(rank, {}).get(t.name, []), f"rank {rank} does not hold")
                there[t.src, t.dst, t.name, t.box, t.dtype] += 1
    for rank in {**plan, **demand}:
        part = plan.get(rank, RankPlan(rank, ()))
        check_arrivals(part, demand.get(rank, Demand(())))
        there.subtract((t.src, t.dst, t.name, t.box, t.dtype) for t in part.transfers if t.dst == rank)
    for (src, dst, name, box, _), count in there.items():
        if count:
            raise PlanError(f"{name} {box} is {'sent' if count > 0 else 'received'} once too often: {src} to {dst}")


def check_arrivals(part: RankPlan, demand: Demand) -> None:
    """Of what a rank wants every element arrives exactly once at its place, and nothing else does.

    Raises:
        PlanError: with the first violation found.
    """
    rank = part.rank
    wanted = pieces_by_name(demand.pieces)
    arriving: dict[str, list[Box]] = defaultdict(list)
    for t in part.transfers:
        if rank not in (t.src, t.dst):
            raise PlanError(f"rank {rank} has no part in {t.name} {t.box}: {t.src} to {t.dst}")
        if t.dst == rank:
            _check_end(t, t.target, wanted.get(t.name, []), f"rank {rank} does not want")
            if t.target is None or t.dtype != t.target.dtype:
                raise PlanError(f"rank {rank} does not want {t.name} {t.box} as {t.dtype}")
            arriving[t.name].append(t.box)
    for name, pieces in wanted.items():
        got, asked = sum(b.numel for b in arriving[name]), sum(p.box.numel for p in pieces)
        union = union_numel(tuple(arriving[name]))
        if not got == asked == union:
            raise PlanError(f"rank {rank}, {name}: {asked} elements wanted, {got} arrive, {union} of them distinct")
    _check_messages(part)


def check_same_tensors(holders: Iterable[Group], readers: Iterable[Group]) -> None:
    """What some rank holds some rank wants, and the reverse: else the two sides would compute different models.

    Raises:
        PlanError: naming the tensors (20 of them) and how many there are.
    """
    held, wanted = (
        {name for _, side in groups for names in side.values() for name in names} for groups in (holders, readers)
    )
    for names, problem in (
        (held - wanted, "tensors are trained and no rollout rank wants them"),
        (wanted - held, "tensors are wanted by rollout ranks and no train rank holds them"),
    ):
        if names:
            raise PlanError(f"{len(names)} {problem}: {', '.join(sorted(names)[:20])}")


def check_routes(routed: Iterable[RoutedClass], holders: Iterable[Group], readers: Iterable[Group]) -> None:
    """What `check_coverage` says of every transfer, said of the first tensor of each class; others are not looked at.

    Raises:
        PlanError: with the first violation found.
    """
    routed, holders, readers = list(routed), list(holders), list(readers)
    known = {name for one in routed for name in one.tensors.names}
    lost = [
        (ranks[0], name) for ranks, side in readers for names in side.values() for name in names if name not in known
    ]
    if lost:
        raise PlanError(f"rank {lost[0][0]} wants {lost[0][1]}, and nothing arrives")
    first = {one.tensors.names[0] for one in routed}
    held, wanted = _boxes_of_ranks(holders, first), _boxes_of_ranks(readers, first)
    wanting: dict[str, list[int]] = defaultdict(list)
    for rank, boxes in wanted.items():
        for name in boxes:
            wanting[name].append(rank)
    for one in routed:
        name = one.tensors.names[0]
        for source in one.sources:
            for rank in source.holders:
                if source.box not in held.get(rank, {}).get(name, ()):
                    raise PlanError(f"rank {rank} does not hold {name} {source.box}")
        for route in one.routes:
            _check_parts(name, route)
            own = {part.held for parts in route.parts.values() for part in parts if part.source is None}
            its = {id(wanted.get(rank)): rank for rank in route.readers}.values()  # of those that want the same, one
            for rank in its:
                if sorted(wanted.get(rank, {}).get(name, ()), key=_place) != sorted(route.parts, key=_place):
                    raise PlanError(f"rank {rank} does not want {name} as it would land there")
            for rank in route.readers if own else ():
                if not own <= set(held.get(rank, {}).get(name, ())):
                    raise PlanError(f"rank {rank} does not hold what it would copy of {name}")
        served = Counter(rank for route in one.routes for rank in route.readers)
        lacking = set(wanting.pop(name, ())).symmetric_difference(served)
        if lacking:
            raise PlanError(f"rank {min(lacking)} wants {name}, and nothing arrives")
        if max(served.values(), default=1) > 1:
            raise PlanError(f"rank {served.most_common(1)[0][0]} gets {name} more than once")


def _place(box: Box) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return box.start, box.size


def _boxes_of_ranks(groups: Iterable[Group], names: Container[str]) -> dict[int, dict[str, tuple[Box, ...]]]:
    """By rank and name, of these tensors; ranks that share a side share one object."""
    found: dict[int, dict[str, tuple[Box, ...]]] = {}
    for ranks, side in groups:
        of_side = {
            name: tuple(box for box, _ in boxes) for boxes, named in side.items() for name in named if name in names
        }
        found |= dict.fromkeys(ranks, of_side)
    return found


def _check_parts(name: str, route: Route) -> None:
    """Of every wanted element one part, within what its source holds."""
    boxes = [part.box for parts in route.parts.values() for part in parts]
    asked, got = sum(box.numel for box in route.parts), sum(box.numel for box in boxes)
    union = union_numel(tuple(boxes))
    inside = all(w.contains(p.box) and p.held.contains(p.box) for w, parts in route.parts.items() for p in parts)
    sources = all(p.source is None or p.source.box == p.held for parts in route.parts.values() for p in parts)
    if not (asked == got == union and inside and sources):
        readers = f"ranks {', '.join(map(str, route.readers[:5]))}"
        raise PlanError(f"{readers}, {name}: {asked} elements wanted, {got} arrive, {union} of them distinct")


def _check_messages(part: RankPlan) -> None:
    """What is not local travels in its bucket's messages, each transfer in one of them, and nothing else does."""
    for bucket in part.buckets:
        carried = Counter(t for message in bucket.messages for t in message.transfers)
        fitting = all((t.src, t.dst, t.dtype) == (m.src, m.dst, m.dtype) for m in bucket.messages for t in m.transfers)
        if not fitting or carried != Counter(t for t in bucket.transfers if not t.is_local):
            raise PlanError("a bucket's messages do not carry each of its transfers once")


def _check_end(transfer: Transfer, end: Piece | None, pieces: Iterable[Piece], problem: str) -> None:
    for piece in pieces:
        if piece.box.contains(transfer.box) and piece.restrict(transfer.box) == end:
            return
    raise PlanError(f"{problem} {transfer.name} {transfer.box} at {end and end.view}")


def lower_bound(
    holdings: Mapping[int, Holdings], demand: Mapping[int, Demand], multiplicity: Mapping[str, int] | None = None
) -> dict[int, int]:
    """Per rank, the fewest bytes that it must receive: the union of wanted boxes minus the union of held boxes.

    In the dtype that is wanted.

    Args:
        times: how often a tensor counts, where it stands for others.
    """
    names = {piece.name for _, side in group_ranks(demand) for piece in side.pieces}
    held = _boxes_of_ranks(rank_groups(holdings), names)
    bound = dict.fromkeys(demand, 0)
    for ranks, side in group_ranks(demand):
        wanted = pieces_by_name(side.pieces)
        count = {name: multiplicity[name] if multiplicity else 1 for name in wanted}
        whole = {name: _lacking(pieces, ()) * count[name] for name, pieces in wanted.items()}
        total = sum(whole.values())
        for rank in ranks:
            if rank != FILES:
                mine = ((name, boxes) for name, boxes in held.get(rank, {}).items() if name in wanted)
                bound[rank] = total - sum(
                    whole[name] - _lacking(wanted[name], boxes) * count[name] for name, boxes in mine
                )
    return bound


def _lacking(wanted: Iterable[Piece], held: tuple[Box, ...]) -> int:
    by_dtype: dict[str, tuple[Box, ...]] = {}
    for piece in wanted:
        by_dtype[piece.dtype] = (*by_dtype.get(piece.dtype, ()), piece.box)
    return sum(union_numel(boxes, held) * ITEMSIZE[dtype] for dtype, boxes in by_dtype.items())
