"""What may move while a part of the weights is still being updated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate

from hybrid3d.reshard.planner import RankPlan

Largest = Callable[[list[int]], list[int]]
"""Place by place the largest of the numbers that all ranks of a plan give."""


def required_optimizer_buckets(
    plan: RankPlan,
    parts: Mapping[str, int],
    buckets: int,
    agree: Largest,
    shared: Mapping[int | None, int] | None = None,
) -> list[int]:
    """By bucket of a rank's plan, the part after which all ranks have what they move in it and in those before.

    With that part a rank starts the bucket, and with its last part, where it has fewer than others, all that are left.
    So it may wait for the others: each of them starts the bucket before it waits for anything behind it.
    Every rank of the plan calls this together.

    Args:
        parts: by tensor, the part in which this rank has its new values; -1 or nothing where it has them before.
        buckets: how many the plan has, with those that this rank has no part in.
        shared: by layer, the part in which the last tensor of it that is not moved has its new values.
    """
    last = [-1] * buckets
    for bucket in plan.buckets:
        sent = (parts.get(t.name, -1) for t in bucket.transfers if t.src == plan.rank)
        last[bucket.number] = max((shared or {}).get(bucket.layer, -1), *sent, -1)
    everywhere = list(accumulate(agree(last), max))
    return [everywhere[bucket.number] for bucket in plan.buckets]
