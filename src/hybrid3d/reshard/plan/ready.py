"""Which buckets of a plan may start while the optimizer is still updating later weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate

from hybrid3d.reshard.plan.planner import RankPlan

AllReduceMax = Callable[[list[int]], list[int]]
"""Element-wise maximum of the lists of numbers that all ranks of a plan pass."""


def required_optimizer_buckets(
    plan: RankPlan,
    optimizer_buckets: Mapping[str, int],
    num_buckets: int,
    all_reduce_max: AllReduceMax,
) -> list[int]:
    """Return, for each bucket of a rank's plan, the optimizer bucket after which all ranks may start it.

    After that optimizer bucket every rank has the new values of all that it sends in this bucket and in the buckets
    before it. A rank starts the bucket after updating that optimizer bucket, or after its own last one if it has fewer.
    This cannot deadlock: the numbers are maxima over all ranks and do not decrease from bucket to bucket, so every
    rank starts a bucket before it waits for any later one, and a rank that waits within a bucket waits only for ranks
    that start this bucket without waiting for anything behind it.

    Every rank of the plan calls this together.

    Args:
        optimizer_buckets: the optimizer bucket that gives each tensor of this rank its new values; -1 or missing for
            a tensor that is not updated.
        num_buckets: the number of buckets of the whole plan, including those in which this rank has no transfer.
        all_reduce_max: the element-wise maximum over all ranks.
    """
    required = [-1] * num_buckets
    for bucket in plan.buckets:
        # what is handed on arrives in an earlier bucket, and needs no more than that one does
        sent = (optimizer_buckets.get(t.name, -1) for t in bucket.transfers if t.src == plan.rank and not t.relayed)
        required[bucket.number] = max(sent, default=-1)
    on_all_ranks = list(accumulate(all_reduce_max(required), max))
    return [on_all_ranks[bucket.number] for bucket in plan.buckets]
