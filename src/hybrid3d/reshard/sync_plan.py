"""The plan of a sync: the routes, which all ranks share, and this rank's transfers. It is made once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from hybrid3d.reshard.ends import Exchange, WeightSink, WeightSource
from hybrid3d.reshard.plan.classes import Group, canonical_shapes, signature_of
from hybrid3d.reshard.plan.coverage import check_arrivals, lower_bound, network_lower_bound, route_sync
from hybrid3d.reshard.plan.layout import LocalPieces
from hybrid3d.reshard.plan.planner import PlanError, RankPlan


@dataclass(frozen=True)
class SyncPlan:
    """What this rank sends, receives and copies in each sync, and what each set of ranks holds.

    Attributes:
        ready: by bucket of the plan, the optimizer bucket after which every rank may start it.
        lower_bound: the fewest bytes that this rank must receive, counted without the plan.
        network_bound: the fewest bytes that must reach this rank's node from others, counted without the plan, on the
            first rank of each node; 0 on the others.
    """

    current: RankPlan
    holders: Sequence[Group]
    ready: Sequence[int]
    lower_bound: int
    network_bound: int


def plan_sync(
    source: WeightSource, sink: WeightSink, exchange: Exchange, bucket_bytes: int, ranks_per_node: int
) -> SyncPlan:
    """Plan a sync, and prepare both ends of this rank for it. Every rank calls it together.

    For `bucket_bytes` and `ranks_per_node` see `Resharder`.

    Raises:
        PlanError: the sinks want a tensor that no source holds or one box twice, or ranks differ in these two.
        UnsupportedLoader: the engine's loader of this model cannot be replayed on shards.
    """
    rank, node, held = exchange.rank, exchange.rank // ranks_per_node, source.holdings
    _check_agreement(exchange, bucket_bytes, ranks_per_node)
    holders = exchange.unique(signature_of(held))
    wanted = sink.demand_for(canonical_shapes(signature for _, signature in holders))
    readers = exchange.unique(signature_of(wanted))
    source.agree(holders, {kind for _, kinds in exchange.unique(frozenset(sink.rounded_scales)) for kind in kinds})
    routes = route_sync(holders, readers, bucket_bytes, ranks_per_node)
    transfers = routes.rank_transfers(rank, LocalPieces({rank: held}, {rank: wanted}))
    boundaries = routes.bucket_boundaries([transfers], exchange.minimum)
    plan = routes.plan(rank, transfers, boundaries)
    sink.prepare(plan.layers)
    bucket_of: dict[str, int] = {}  # the last one, where a canonical tensor lies in several local tensors
    for piece in held.pieces:
        updated_in = source.ready_after.get(piece.view.tensor, -1)
        bucket_of[piece.name] = max(bucket_of.get(piece.name, -1), updated_in)
    ready = required_optimizer_buckets(plan, bucket_of, len(boundaries), exchange.maximum)
    check_arrivals(plan, wanted)
    of_node = [other for other in exchange.ranks if other // ranks_per_node == node]
    first_of = {node} if rank == min(of_node) else set()
    return SyncPlan(
        current=plan,
        holders=holders,
        ready=ready,
        lower_bound=lower_bound({rank: held}, {rank: wanted})[rank],
        network_bound=sum(network_lower_bound(holders, readers, ranks_per_node, nodes=first_of).values()),
    )


def _check_agreement(exchange: Exchange, bucket_bytes: int, ranks_per_node: int) -> None:
    """Check that all ranks cut the same messages; those of other sizes would end processes within gloo."""
    given = exchange.unique((bucket_bytes, ranks_per_node))
    for place, name in enumerate(("bucket_bytes (bucket_mib x 2**20)", "ranks_per_node")):
        ranks_of: dict[int, list[int]] = {}
        for ranks, numbers in given:
            ranks_of.setdefault(numbers[place], []).extend(ranks)
        if len(ranks_of) > 1:
            found = "; ".join(
                f"{value} on {'rank' if len(ranks) == 1 else 'ranks'} {listed([*map(str, ranks)])}"
                for value, ranks in ranks_of.items()
            )
            raise PlanError(f"{name} is {found}: give all {len(exchange.ranks)} ranks the same")


LISTED = 5  # names, or ranks, that a message has


def listed(names: Sequence[str]) -> str:
    """Return the first names, and the number of the others, for a message."""
    return ", ".join(names[:LISTED]) + (f" and {len(names) - LISTED} more" if len(names) > LISTED else "")


def corrupted_on_any(names: Sequence[str] | None, exchange: Exchange) -> tuple[str, ...]:
    """Return the corrupted tensors of all ranks, sorted; the ranks also wait for each other here."""
    return tuple(sorted({name for _, of_ranks in exchange.unique(names) for name in of_ranks or ()}))


def required_optimizer_buckets(
    plan: RankPlan,
    optimizer_buckets: Mapping[str, int],
    num_buckets: int,
    all_reduce_max: Callable[[list[int]], list[int]],
) -> list[int]:
    """Return, for each bucket of a rank's plan, the optimizer bucket after which all ranks may start it.

    After that optimizer bucket every rank has the new values of all that it sends in this bucket and in the buckets
    before it. A rank starts the bucket after updating that optimizer bucket, or after its own last one if it has fewer.
    This cannot deadlock: the numbers are maxima over all ranks and do not decrease from bucket to bucket, so every
    rank starts a bucket before it waits for any later one, and a rank that waits within a bucket waits only for ranks
    that start this bucket without waiting for anything behind it.

    Every rank of the plan calls this together.

    Args:
        optimizer_buckets: the one that gives each tensor of this rank its new values; -1 or missing if none does.
        num_buckets: of the whole plan, including those in which this rank has no transfer.
        all_reduce_max: returns the element-wise maximum of the lists that all ranks of the plan pass.
    """
    required = [-1] * num_buckets
    for bucket in plan.buckets:
        # what is handed on arrives in an earlier bucket, and needs no more than that one does
        sent = (optimizer_buckets.get(t.name, -1) for t in bucket.transfers if t.src == plan.rank and not t.relayed)
        required[bucket.number] = max(sent, default=-1)
    on_all_ranks = list(accumulate(all_reduce_max(required), max))
    return [on_all_ranks[bucket.number] for bucket in plan.buckets]
