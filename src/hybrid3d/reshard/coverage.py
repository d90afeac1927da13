"""Checks that a plan is right before it runs, and counts its lower bound, each without the planner's own code."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

import numpy as np

from hybrid3d.reshard.box import Box
from hybrid3d.reshard.layout import ITEMSIZE, Demand, Holdings, Piece
from hybrid3d.reshard.planner import FILES, Plan, PlanError, Transfer
from hybrid3d.reshard.stamp import distinct


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
        union = volume(targets)
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

    Counted on the grid that the edges of all boxes draw (coordinate compression), in the dtype that is wanted.

    Args:
        times: how often a tensor counts, where it stands for others.
    """
    held = _by_name(holdings)
    bound = dict.fromkeys(demand, 0)
    for (rank, name), pieces in _by_name(demand).items():
        if rank == FILES:
            continue
        have = [p.box for p in held.get((rank, name), [])]
        for dtype in {p.dtype for p in pieces}:
            lacking = volume([p.box for p in pieces if p.dtype == dtype], without=have)
            bound[rank] += lacking * ITEMSIZE[dtype] * (times[name] if times else 1)
    return bound


def volume(boxes: list[Box], without: list[Box] | None = None) -> int:
    """The number of elements in the union of `boxes` that lie in none of `without`."""
    if not boxes:
        return 0
    if len(boxes) == 1 and not without:
        return boxes[0].numel
    every = [*boxes, *(without or [])]
    edges = [np.unique([e for b in every for e in (b.start[d], b.stop[d])]) for d in range(len(boxes[0].size))]
    covered = np.zeros([len(e) for e in edges], dtype=bool)
    for value, group in ((True, boxes), (False, without or [])):
        for box in group:
            cells = (np.searchsorted(e, ab) for e, ab in zip(edges, zip(box.start, box.stop, strict=True), strict=True))
            covered[tuple(slice(a, b) for a, b in cells)] = value
    for dim, e in enumerate(edges):
        covered = covered * np.append(np.diff(e), 0).reshape([-1 if d == dim else 1 for d in range(len(edges))])
    return int(covered.sum())


def _by_name(sides: Mapping[int, Holdings] | Mapping[int, Demand]) -> dict[tuple[int, str], list[Piece]]:
    by_name: dict[tuple[int, str], list[Piece]] = defaultdict(list)
    for rank, side in sides.items():
        for piece in side.pieces:
            by_name[rank, piece.name].append(piece)
    return by_name
