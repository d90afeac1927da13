"""Checks that a plan is right before it runs, and counts its lower bound, each without the planner's own code."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from hybrid3d.reshard.box import Box, volume
from hybrid3d.reshard.classes import distinct
from hybrid3d.reshard.layout import ITEMSIZE, Demand, Holdings, Piece
from hybrid3d.reshard.planner import FILES, Plan, PlanError, Transfer, make_plan
from hybrid3d.reshard.routes import Route, Routed


def checked_plan(
    holdings: Mapping[int, Holdings], demand: Mapping[int, Demand], bucket_bytes: int, ranks_per_node: int
) -> Plan:
    """`make_plan`, checked: every element that is wanted arrives once.

    Raises:
        PlanError: what is held and what is wanted do not fit each other.
    """
    plan = make_plan(holdings, demand, bucket_bytes, ranks_per_node)
    check_coverage(plan, holdings, demand)
    return plan


def check_coverage(plan: Plan, holdings: Mapping[int, Holdings], demand: Mapping[int, Demand]) -> None:
    """Every wanted element arrives exactly once, at its place, from a rank that holds it, and nothing else moves.

    Raises:
        PlanError: with the first violation found.
    """
    arriving: dict[tuple[int, str], list[Transfer]] = defaultdict(list)
    for t in plan.transfers:
        arriving[t.dst, t.target.name].append(t)
    held = _by_name(holdings)
    wanted = _by_name(demand)
    for key, transfers in arriving.items():
        for t in transfers:
            _check_end(t.source, held.get((t.src, t.source.name), []), f"rank {t.src} does not hold")
            _check_end(t.target, wanted.get(key, []), f"rank {t.dst} does not want")
            if t.source.name != t.target.name or t.source.box != t.target.box:
                raise PlanError(f"rank {t.dst}: {t.source.name} {t.source.box} would land as {t.target}")
    _check_messages(plan)
    for (rank, name), pieces in wanted.items():
        targets = [t.target.box for t in arriving[rank, name]]
        got, asked = sum(b.numel for b in targets), sum(p.box.numel for p in pieces)
        union = volume(tuple(targets))
        if not got == asked == union:
            raise PlanError(f"rank {rank}, {name}: {asked} elements wanted, {got} arrive, {union} of them distinct")


def check_same_tensors(holdings: Mapping[int, Holdings], demand: Mapping[int, Demand]) -> None:
    """What some rank holds some rank wants, and the reverse: else the two sides would compute different models.

    Raises:
        PlanError: naming the tensors (20 of them) and how many there are.
    """
    held = {piece.name for _, side in distinct(holdings) for piece in side.pieces}
    wanted = {piece.name for _, side in distinct(demand) for piece in side.pieces}
    for names, problem in (
        (held - wanted, "tensors are trained and no rollout rank wants them"),
        (wanted - held, "tensors are wanted by rollout ranks and no train rank holds them"),
    ):
        if names:
            raise PlanError(f"{len(names)} {problem}: {', '.join(sorted(names)[:20])}")


def check_routes(routed: Iterable[Routed], holdings: Mapping[int, Holdings], demand: Mapping[int, Demand]) -> None:
    """What `check_coverage` says of every transfer, said of the first tensor of each class.

    Raises:
        PlanError: with the first violation found.
    """
    held, wanted = _boxes_by_name(distinct(holdings)), _boxes_by_name(distinct(demand))
    routed = list(routed)
    standing = {name: one.tensors.names[0] for one in routed for name in one.tensors.names}
    wanting: dict[str, list[int]] = defaultdict(list)
    for ranks, side in distinct(demand):
        for name in {piece.name for piece in side.pieces}:
            if standing.get(name, name) == name:
                wanting[name] += ranks
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
        lacking = set(wanting.pop(name, ())).symmetric_difference(r for route in one.routes for r in route.readers)
        if lacking:
            raise PlanError(f"rank {min(lacking)} wants {name}, and nothing arrives")
    if wanting:
        name, ranks = next(iter(wanting.items()))
        raise PlanError(f"rank {ranks[0]} wants {name}, and nothing arrives")


def _place(box: Box) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return box.start, box.size


def _boxes_by_name(
    groups: Iterable[tuple[list[int], Holdings | Demand]],
) -> dict[int, dict[str, tuple[Box, ...]]]:
    """By rank and name; ranks that share a side share one object."""
    found: dict[int, dict[str, tuple[Box, ...]]] = {}
    for ranks, side in groups:
        of_side: dict[str, tuple[Box, ...]] = {}
        for piece in side.pieces:
            of_side[piece.name] = (*of_side.get(piece.name, ()), piece.box)
        found |= dict.fromkeys(ranks, of_side)
    return found


def _check_parts(name: str, route: Route) -> None:
    """Of every wanted element one part, within what its source holds."""
    boxes = [part.box for parts in route.parts.values() for part in parts]
    asked, got = sum(box.numel for box in route.parts), sum(box.numel for box in boxes)
    union = volume(tuple(boxes))
    inside = all(w.contains(p.box) and p.held.contains(p.box) for w, parts in route.parts.items() for p in parts)
    sources = all(p.source is None or p.source.box == p.held for parts in route.parts.values() for p in parts)
    if not (asked == got == union and inside and sources):
        readers = f"ranks {', '.join(map(str, route.readers[:5]))}"
        raise PlanError(f"{readers}, {name}: {asked} elements wanted, {got} arrive, {union} of them distinct")


def _check_messages(plan: Plan) -> None:
    """What is not local travels in its bucket's messages, each transfer in one of them, and nothing else does."""
    for bucket in plan.buckets:
        carried = Counter(t for message in bucket.messages for t in message.transfers)
        fitting = all(
            (t.src, t.dst, t.target.dtype) == (m.src, m.dst, m.dtype) for m in bucket.messages for t in m.transfers
        )
        if not fitting or carried != Counter(t for t in bucket.transfers if not t.is_local):
            raise PlanError("a bucket's messages do not carry each of its transfers once")


def _check_end(end: Piece, pieces: Iterable[Piece], problem: str) -> None:
    for piece in pieces:
        if piece.box.contains(end.box) and piece.part(end.box) == end:
            return
    raise PlanError(f"{problem} {end.name} {end.box} at {end.view}")


def lower_bound(
    holdings: Mapping[int, Holdings], demand: Mapping[int, Demand], times: Mapping[str, int] | None = None
) -> dict[int, int]:
    """Per rank, the fewest bytes that it must receive: the union of wanted boxes minus the union of held boxes.

    In the dtype that is wanted.

    Args:
        times: how often a tensor counts, where it stands for others.
    """
    held = _boxes_by_name(distinct(holdings))
    bound = dict.fromkeys(demand, 0)
    for ranks, side in distinct(demand):
        wanted: dict[str, list[Piece]] = defaultdict(list)
        for piece in side.pieces:
            wanted[piece.name].append(piece)
        count = {name: times[name] if times else 1 for name in wanted}
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
    return sum(volume(boxes, held) * ITEMSIZE[dtype] for dtype, boxes in by_dtype.items())


def _by_name(sides: Mapping[int, Holdings] | Mapping[int, Demand]) -> dict[tuple[int, str], list[Piece]]:
    by_name: dict[tuple[int, str], list[Piece]] = defaultdict(list)
    for rank, side in sides.items():
        for piece in side.pieces:
            by_name[rank, piece.name].append(piece)
    return by_name
