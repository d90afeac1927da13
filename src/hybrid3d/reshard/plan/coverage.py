"""Checks of a plan before it runs, and its lower bound, computed independently of the planner."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter

from hybrid3d.reshard.plan.box import Box, union_numel
from hybrid3d.reshard.plan.classes import Group, Signature, rank_groups
from hybrid3d.reshard.plan.layout import FILES, ITEMSIZE, Demand, Holdings, Piece, pieces_by_name
from hybrid3d.reshard.plan.planner import Plan, PlanError, RankPlan, Routes, Transfer
from hybrid3d.reshard.plan.relays import Relay
from hybrid3d.reshard.plan.routes import Part, Route, RoutedClass, Source

_sort_key = attrgetter("start", "size")


def check_coverage(plan: Plan, holdings: Mapping[int, Holdings], demand: Mapping[int, Demand]) -> None:
    """Check that each wanted element arrives exactly once, where it is wanted, from a rank that holds it.

    A rank that hands it on must have received it from such a rank in an earlier bucket. Nothing else may move.

    Raises:
        PlanError: with the first violation found.
    """
    sent = Counter[tuple[int | bool | str | Box, ...]]()
    held = {rank: pieces_by_name(rank_holdings.pieces) for rank, rank_holdings in holdings.items()}
    for rank, rank_plan in plan.items():
        for t in rank_plan.transfers:
            if t.src == rank:
                if not t.relayed:  # `check_arrivals` checks the others
                    _check_end(t, t.source, held.get(rank, {}).get(t.name, []), f"rank {rank} does not hold")
                sent[_sent_as(t)] += 1
    for rank in {**plan, **demand}:
        rank_plan = plan.get(rank, RankPlan(rank, ()))
        check_arrivals(rank_plan, demand.get(rank, Demand(())))
        sent.subtract(_sent_as(t) for t in rank_plan.transfers if t.dst == rank)
    for (src, dst, name, box, *_), count in sent.items():
        if count:
            raise PlanError(f"{name} {box} is {'sent' if count > 0 else 'received'} once too often: {src} to {dst}")


def _sent_as(t: Transfer) -> tuple[int | bool | str | Box, ...]:
    """Return all on which both ends of a transfer must agree."""
    return t.src, t.dst, t.name, t.box, t.dtype, t.relayed, t.handed_on


def check_arrivals(rank_plan: RankPlan, demand: Demand) -> None:
    """Check that each element that a rank wants arrives exactly once, where it is wanted, and nothing else does.

    Check also that the rank hands on only what it has received in an earlier bucket, from a rank that holds it.

    Raises:
        PlanError: with the first violation found.
    """
    rank = rank_plan.rank
    wanted = pieces_by_name(demand.pieces)
    arriving: dict[str, list[Box]] = defaultdict(list)
    for t in rank_plan.transfers:
        if rank not in (t.src, t.dst):
            raise PlanError(f"rank {rank} has no part in {t.name} {t.box}: {t.src} to {t.dst}")
        if t.dst == rank:
            _check_end(t, t.target, wanted.get(t.name, []), f"rank {rank} does not want")
            if t.target is None or t.dtype != t.target.dtype:
                raise PlanError(f"rank {rank} does not want {t.name} {t.box} as {t.dtype}")
            arriving[t.name].append(t.box)
    for name, pieces in wanted.items():
        num_arriving, num_wanted = sum(b.numel for b in arriving[name]), sum(p.box.numel for p in pieces)
        union = union_numel(tuple(arriving[name]))
        if not num_arriving == num_wanted == union:
            raise PlanError(
                f"rank {rank}, {name}: {num_wanted} elements wanted, {num_arriving} arrive, {union} of them distinct"
            )
    _check_relays(rank_plan, wanted)
    _check_messages(rank_plan)


def _check_relays(rank_plan: RankPlan, wanted: Mapping[str, list[Piece]]) -> None:
    """Check that what a rank hands on has landed before, in the memory from which it is read, in the same layer."""
    landed: dict[tuple[str, Box, str], int | None] = {}
    for bucket in rank_plan.buckets:
        for t in bucket.transfers:
            if t.relayed and t.src == rank_plan.rank:
                if t.handed_on or t.is_local or (t.name, t.box, t.dtype) not in landed:
                    raise PlanError(f"rank {t.src} hands on {t.name} {t.box}, which it has not received before")
                if landed[t.name, t.box, t.dtype] != bucket.layer:
                    raise PlanError(f"rank {t.src} hands on {t.name} {t.box} when it receives another layer")
                _check_end(t, t.source, wanted.get(t.name, []), f"rank {t.src} has not received")
        landed |= {
            (t.name, t.box, t.dtype): bucket.layer
            for t in bucket.transfers
            if t.dst == rank_plan.rank and t.handed_on and not t.relayed and not t.is_local
        }


def route_sync(holders: Sequence[Group], readers: Sequence[Group], bucket_bytes: int, ranks_per_node: int) -> Routes:
    """Return the routes of a sync, after a check that both engines have the same tensors; arguments: as for `Routes`.

    Raises:
        PlanError: they have not, or a rank wants elements that no rank holds.
    """
    check_same_tensors(holders, readers)
    return Routes(holders, readers, bucket_bytes, ranks_per_node, relays=True)


def check_same_tensors(holders: Iterable[Group], readers: Iterable[Group]) -> None:
    """Check that both engines have the same tensors; otherwise they would compute different models.

    Raises:
        PlanError: they have not; names up to 20 of the tensors, and says how many there are.
    """
    held, wanted = (
        {name for _, side in groups for names in side.values() for name in names} for groups in (holders, readers)
    )
    for names, problem in (
        (held - wanted, "tensors are held by train ranks and wanted by no rollout rank"),
        (wanted - held, "tensors are wanted by rollout ranks and held by no train rank"),
    ):
        if names:
            raise PlanError(f"{len(names)} {problem}: {', '.join(sorted(names)[:20])}")


def check_routes(routed: Iterable[RoutedClass], holders: Iterable[Group], readers: Iterable[Group]) -> None:
    """Check the routes of the first tensor of each class as `check_coverage` checks every transfer.

    Raises:
        PlanError: with the first violation found.
    """
    routed, holders, readers = list(routed), list(holders), list(readers)
    routed_names = {name for routed_class in routed for name in routed_class.tensors.names}
    missing = [
        (ranks[0], name)
        for ranks, side in readers
        for names in side.values()
        for name in names
        if name not in routed_names
    ]
    if missing:
        raise PlanError(f"rank {missing[0][0]} wants {missing[0][1]}, and nothing arrives")
    first = {routed_class.tensors.names[0] for routed_class in routed}
    held, wanted = _boxes_of_ranks(holders, first), _boxes_of_ranks(readers, first)
    wanting: dict[str, list[int]] = defaultdict(list)
    for rank, boxes in wanted.items():
        for name in boxes:
            wanting[name].append(rank)
    for routed_class in routed:
        name = routed_class.tensors.names[0]
        _check_shares(name, routed_class)
        for source in routed_class.sources:
            for rank in source.holders:
                if source.box not in held.get(rank, {}).get(name, ()):
                    raise PlanError(f"rank {rank} does not hold {name} {source.box}")
        for route in routed_class.routes:
            _check_parts(name, route)
            local_boxes = {part.held for parts in route.parts.values() for part in parts if part.source is None}
            # ranks that share one object want the same: check one of them
            representatives = {id(wanted.get(rank)): rank for rank in route.readers}.values()
            for rank in representatives:
                if sorted(wanted.get(rank, {}).get(name, ()), key=_sort_key) != sorted(route.parts, key=_sort_key):
                    raise PlanError(f"rank {rank} does not want the boxes of {name} that its route brings")
            for rank in route.readers if local_boxes else ():
                if not local_boxes <= set(held.get(rank, {}).get(name, ())):
                    raise PlanError(f"rank {rank} does not hold the boxes of {name} that it would copy locally")
        served = Counter(rank for route in routed_class.routes for rank in route.readers)
        unmatched = set(wanting.pop(name, ())).symmetric_difference(served)
        if unmatched:
            raise PlanError(f"rank {min(unmatched)} wants {name}, and nothing arrives")
        if max(served.values(), default=1) > 1:
            raise PlanError(f"rank {served.most_common(1)[0][0]} gets {name} more than once")


def _check_shares(name: str, routed_class: RoutedClass) -> None:
    """Check that ranks hand on, within their node, exactly what they receive from a rank that holds it."""
    relays = [
        (route, part, part.source)
        for route in routed_class.routes
        for parts in route.parts.values()
        for part in parts
        if isinstance(part.source, Relay)
    ]
    route_of = {rank: route for route in routed_class.routes for rank in route.readers} if relays else {}
    for route, part, relay in relays:
        checked: dict[int, bool] = {}  # ranks of one route receive the same
        for rank in route.readers:
            sender = relay.sender(rank, 0)
            together = sender // relay.ranks_per_node == rank // relay.ranks_per_node
            of_sender = route_of.get(sender) if sender != rank else None
            if id(of_sender) not in checked:
                checked[id(of_sender)] = of_sender is not None and _receives(of_sender, part)
            if not together or not checked[id(of_sender)]:
                raise PlanError(f"rank {sender} does not receive {name} {part.box}, which it would hand on to {rank}")


def _receives(route: Route, relayed: Part) -> bool:
    """Return whether the readers of a route receive, from a rank that holds it, what they hand on as `relayed`."""
    received = replace(relayed, source=None, handed_on=True)
    return any(
        isinstance(part.source, Source) and replace(part, source=None, held=relayed.held) == received
        for part in route.parts.get(relayed.held, ())
    )


def _boxes_of_ranks(groups: Iterable[Group], names: Container[str]) -> dict[int, dict[str, tuple[Box, ...]]]:
    """Return the boxes of these tensors by rank and name; the ranks of one group share one object."""
    found: dict[int, dict[str, tuple[Box, ...]]] = {}
    for ranks, signature in groups:
        boxes_by_name = {
            name: tuple(box for box, _ in boxes)
            for boxes, tensors in signature.items()
            for name in tensors
            if name in names
        }
        found |= dict.fromkeys(ranks, boxes_by_name)
    return found


def _check_parts(name: str, route: Route) -> None:
    """Check that the parts of a route cover each wanted element once, and lie within what their source holds."""
    boxes = [part.box for parts in route.parts.values() for part in parts]
    num_wanted, num_arriving = sum(box.numel for box in route.parts), sum(box.numel for box in boxes)
    union = union_numel(tuple(boxes))
    inside = all(w.contains(p.box) and p.held.contains(p.box) for w, parts in route.parts.items() for p in parts)
    sources = all(p.source is None or p.source.box == p.held for parts in route.parts.values() for p in parts)
    if not (num_wanted == num_arriving == union and inside and sources):
        readers = f"ranks {', '.join(map(str, route.readers[:5]))}"
        raise PlanError(
            f"{readers}, {name}: {num_wanted} elements wanted, {num_arriving} arrive, {union} of them distinct"
        )


def _check_messages(rank_plan: RankPlan) -> None:
    """Check that the messages of each bucket carry each of its transfers between ranks once, and nothing else."""
    for bucket in rank_plan.buckets:
        carried = Counter(t for message in bucket.messages for t in message.transfers)
        matching = all((t.src, t.dst, t.dtype) == (m.src, m.dst, m.dtype) for m in bucket.messages for t in m.transfers)
        if not matching or carried != Counter(t for t in bucket.transfers if not t.is_local):
            raise PlanError("a bucket's messages do not carry each of its transfers once")


def _check_end(transfer: Transfer, end: Piece | None, pieces: Iterable[Piece], problem: str) -> None:
    for piece in pieces:
        if piece.box.contains(transfer.box) and piece.restrict(transfer.box) == end:
            return
    raise PlanError(f"{problem} {transfer.name} {transfer.box} at {end and end.view}")


def lower_bound(
    holdings: Mapping[int, Holdings], demand: Mapping[int, Demand], multiplicity: Mapping[str, int] | None = None
) -> dict[int, int]:
    """Return the fewest bytes that each rank must receive: the union of wanted boxes minus the union of held boxes.

    Bytes are counted in the wanted dtype.

    Args:
        multiplicity: the number of tensors that each name represents; 1 by default.
    """
    of_nodes = network_lower_bound(rank_groups(holdings), rank_groups(demand), 1, multiplicity)  # of one rank each
    return {rank: of_nodes.get(rank, 0) for rank in demand}


def network_lower_bound(
    holders: Iterable[Group],
    readers: Iterable[Group],
    ranks_per_node: int,
    multiplicity: Mapping[str, int] | None = None,
    nodes: Container[int] | None = None,
) -> dict[int, int]:
    """Return the fewest bytes that must reach each node from other nodes, by node.

    They are the union of what the node's ranks want minus the union of what they hold, by wanted dtype.

    Args:
        multiplicity: as for `lower_bound`.
        nodes: count for these nodes only; by default for all whose ranks want a tensor.
    """
    held, wanted = _signatures_by_node(holders, ranks_per_node), _signatures_by_node(readers, ranks_per_node)
    counted: dict[tuple[frozenset[int], frozenset[int]], int] = {}  # nodes of equal ranks need the same
    bound = {}
    for node, wanting in wanted.items():
        if nodes is not None and node not in nodes:
            continue
        holding = held.get(node, {})
        kind = frozenset(wanting), frozenset(holding)
        if kind not in counted:
            counted[kind] = _missing_on_node(wanting.values(), holding.values(), multiplicity)
        bound[node] = counted[kind]
    return bound


def _signatures_by_node(groups: Iterable[Group], ranks_per_node: int) -> dict[int, dict[int, Signature]]:
    """Return the signatures of each node's ranks, by their id; the files of a checkpoint are no rank here."""
    found: dict[int, dict[int, Signature]] = defaultdict(dict)
    for ranks, signature in groups:
        for rank in ranks:
            if rank != FILES:
                found[rank // ranks_per_node][id(signature)] = signature
    return found


def _missing_on_node(
    wanting: Iterable[Signature], holding: Iterable[Signature], multiplicity: Mapping[str, int] | None
) -> int:
    """Return the bytes of the union of what these ranks want minus the union of what these hold."""
    wanted: dict[tuple[str, str], set[Box]] = defaultdict(set)
    for signature in wanting:
        for boxes, names in signature.items():
            for name in names:
                for box, dtype in boxes:
                    wanted[name, dtype].add(box)
    held: dict[str, set[Box]] = defaultdict(set)
    for signature in holding:
        for boxes, names in signature.items():
            for name in names:
                held[name] |= {box for box, _ in boxes}
    return sum(
        union_numel(_sorted(boxes), _sorted(held.get(name, ())))
        * ITEMSIZE[dtype]
        * (multiplicity[name] if multiplicity else 1)
        for (name, dtype), boxes in wanted.items()
    )


def _sorted(boxes: Iterable[Box]) -> tuple[Box, ...]:
    boxes = tuple(boxes)
    return boxes if len(boxes) < 2 else tuple(sorted(boxes, key=_sort_key))
