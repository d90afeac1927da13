"""The plan of a sync: the routes, which all ranks share, and this rank's transfers. It is made once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybrid3d.reshard.ends import Exchange, WeightSink, WeightSource
from hybrid3d.reshard.plan.classes import Group, canonical_shapes, signature_of
from hybrid3d.reshard.plan.coverage import check_arrivals, lower_bound, network_lower_bound, route_sync
from hybrid3d.reshard.plan.layout import LocalPieces
from hybrid3d.reshard.plan.planner import RankPlan
from hybrid3d.reshard.plan.ready import required_optimizer_buckets
from hybrid3d.sync.settings import SyncSettings


@dataclass(frozen=True)
class SyncPlan:
    """What this rank sends, receives and copies in each sync.

    Attributes:
        current: the plan of this rank.
        holders: what each set of ranks holds.
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


def plan_sync(source: WeightSource, sink: WeightSink, settings: SyncSettings, exchange: Exchange) -> SyncPlan:
    """Plan a sync, and prepare both ends of this rank for it. Every rank calls it together.

    Raises:
        PlanError: the sinks want a tensor that no source holds, or want one box twice.
        UnsupportedLoader: the engine's loader of this model cannot be replayed on shards.
    """
    rank, per_node = exchange.rank, settings.ranks_per_node
    held = source.holdings
    holders = exchange.unique(signature_of(held))
    wanted = sink.demand_for(canonical_shapes(signature for _, signature in holders))
    readers = exchange.unique(signature_of(wanted))
    source.agree(holders, {kind for _, kinds in exchange.unique(frozenset(sink.rounded_scales)) for kind in kinds})
    routes = route_sync(holders, readers, settings.bucket_bytes, per_node)
    transfers = routes.rank_transfers(rank, LocalPieces({rank: held}, {rank: wanted}))
    boundaries = routes.bucket_boundaries([transfers], exchange.minimum)
    plan = routes.plan(rank, transfers, boundaries)
    sink.prepare(plan.layers)
    bucket_of = {piece.name: source.ready_after.get(piece.view.tensor, -1) for piece in held.pieces}
    ready = required_optimizer_buckets(plan, bucket_of, len(boundaries), exchange.maximum)
    check_arrivals(plan, wanted)
    of_node = [other for other in exchange.ranks if other // per_node == rank // per_node]
    first_of = {rank // per_node} if rank == min(of_node) else set()
    return SyncPlan(
        current=plan,
        holders=holders,
        ready=ready,
        lower_bound=lower_bound({rank: held}, {rank: wanted})[rank],
        network_bound=sum(network_lower_bound(holders, readers, per_node, nodes=first_of).values()),
    )
