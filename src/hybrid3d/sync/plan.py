"""The plan of a sync: the routes, which all ranks share, and this rank's transfers. It is made once."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch.distributed as dist

from hybrid3d.config import Recipe
from hybrid3d.distributed import all_reduce_max, all_reduce_min, gather_unique
from hybrid3d.reshard.plan.classes import signature_of
from hybrid3d.reshard.plan.coverage import check_arrivals, check_same_tensors, lower_bound, network_lower_bound
from hybrid3d.reshard.plan.layout import Demand, Holdings, LocalPieces
from hybrid3d.reshard.plan.planner import Routes
from hybrid3d.reshard.plan.ready import required_optimizer_buckets
from hybrid3d.train.megatron.source import MegatronWeights, canonical_shapes

if TYPE_CHECKING:  # a sync is between a source and a sink, so that ranks without vLLM can have one
    from hybrid3d.rollout.engine import RolloutEngine
    from hybrid3d.rollout.sink import RolloutWeights

NOTHING_HELD, NOTHING_WANTED = Holdings(()), Demand((), ())


class SyncPlan:
    """What this rank sends, receives and copies in each sync. Every rank of the group constructs it together.

    Attributes:
        holders: what each set of ranks holds.
        sink: vLLM's weights on this rank; None on a rank without an engine.
        lower_bound: the fewest bytes that this rank must receive, counted without the plan.
        network_bound: the fewest bytes that must reach this rank's node from others, counted without the plan, on the
            first rank of each node; 0 on the others.
        current: the plan of this rank.
        ready: by bucket of the plan, the optimizer bucket after which every rank may start it.

    Raises:
        PlanError: vLLM wants a tensor that Megatron does not hold, or wants one box twice.
        UnsupportedLoader: vLLM's loader of this model cannot be replayed on shards.
    """

    def __init__(
        self,
        recipe: Recipe,
        group: dist.ProcessGroup,
        trained: MegatronWeights | None,
        engine: RolloutEngine | None,
        optimizer_buckets: Mapping[str, int],
        ranks: Sequence[int] | None = None,
    ):
        """
        Args:
            optimizer_buckets: the optimizer bucket of each of the trainer's local tensors.
            ranks: the rank of each member of the group, which says what node it is on; by default that in the group.
        """
        ranks = ranks or range(group.size())
        rank = ranks[group.rank()]
        held = NOTHING_HELD if trained is None else trained.holdings
        self.holders = [([ranks[m] for m in same], found) for same, found in gather_unique(signature_of(held), group)]
        shapes = canonical_shapes([signature for _, signature in self.holders])
        self.sink: RolloutWeights | None = None if engine is None else engine.weights(shapes)
        wanted = NOTHING_WANTED if self.sink is None else self.sink.demand
        readers = [([ranks[m] for m in same], found) for same, found in gather_unique(signature_of(wanted), group)]
        check_same_tensors(self.holders, readers)
        per_node = recipe.machine.gpus_per_node
        routes = Routes(self.holders, readers, recipe.sync.bucket_bytes, per_node, relays=True)
        transfers = routes.rank_transfers(rank, LocalPieces({rank: held}, {rank: wanted}))
        boundaries = routes.bucket_boundaries([transfers], partial(all_reduce_min, group=group))
        self.lower_bound = lower_bound({rank: held}, {rank: wanted})[rank]
        of_node = [other for other in ranks if other // per_node == rank // per_node]
        first_of = {rank // per_node} if rank == min(of_node) else set()
        self.network_bound = sum(network_lower_bound(self.holders, readers, per_node, nodes=first_of).values())
        self.current = routes.plan(rank, transfers, boundaries)
        if self.sink is not None:
            self.sink.prepare(self.current.layers)
        bucket_of = {piece.name: optimizer_buckets.get(piece.view.tensor, -1) for piece in held.pieces}
        self.ready = required_optimizer_buckets(
            self.current, bucket_of, len(boundaries), partial(all_reduce_max, group=group)
        )
        check_arrivals(self.current, wanted)

    @property
    def rounded_scales(self) -> Collection[str]:
        """The tensors in FP8 of which this rank's engine takes only scales that are powers of two."""
        return () if self.sink is None else self.sink.rounded_scales()
