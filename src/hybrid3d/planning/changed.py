"""Predicts a sync that sends only changed elements, from the plan of a full one: see `reshard/delta/executor.py`.

The changed elements are taken to be spread evenly over all tensors; with `rollout.quantization` all are taken for FP8.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hybrid3d.config import Recipe
from hybrid3d.planning.engine_queries import EngineAnswers
from hybrid3d.planning.hardware import Hardware
from hybrid3d.planning.seconds import SyncTime, estimate_sync_time, inter_node_bytes
from hybrid3d.planning.sync_choice import (
    RUN,
    SyncLoad,
    delta_seconds,
    encoded_part,
    encoding_seconds,
    hidden_seconds,
)
from hybrid3d.planning.traffic import SyncTraffic
from hybrid3d.reshard.delta.encoding import entropy_bytes
from hybrid3d.reshard.delta.encoding_work import EncodingWork, count_encoding
from hybrid3d.reshard.fp8 import FP8
from hybrid3d.reshard.plan.classes import rank_groups
from hybrid3d.reshard.plan.layout import ITEMSIZE, LocalPieces
from hybrid3d.reshard.plan.planner import Routes


@dataclass(frozen=True)
class ChangedSync:
    """A sync of the elements that changed. Sums over ranks, in bytes.

    Attributes:
        fraction: of the elements that changed.
        delta_bytes: that ranks receive.
        delta_bound_bytes: the entropy of it.
        delta_network_bytes: the part of `delta_bytes` that comes from other nodes.
        bitmap_bytes: the memory of the bitmaps on the fullest rank.
        wire: the predicted time of the messages alone, and of copies of their bytes.
        seconds: of the slowest rank, with finding, encoding, decoding and writing the changed elements.
        encoding_seconds: the part of them that is no message, on that rank.
        dense_seconds: of a sync of all elements, beside the optimizer's step.
        work: what is counted of the slowest rank.
    """

    fraction: float
    delta_bytes: int
    delta_bound_bytes: int
    delta_network_bytes: int
    bitmap_bytes: int
    wire: SyncTime
    seconds: float
    encoding_seconds: float
    dense_seconds: float
    work: EncodingWork

    @property
    def is_faster(self) -> bool:
        """Whether `sync.delta: auto` sends only the changed elements."""
        return bool(self.seconds < self.dense_seconds)


def predict_changed_sync(
    recipe: Recipe,
    traffic: SyncTraffic,
    network_bytes: int,
    hardware: Hardware,
    fraction: float,
    work: Mapping[int, EncodingWork],
) -> ChangedSync:
    """Predict a sync of the elements that changed.

    Args:
        network_bytes: that a full sync receives from other nodes.
        fraction: of the elements that changed, above 0 and up to 1.
        work: by rank, what `count_work` counts.
    """
    itemsize, per_node = ITEMSIZE[FP8 if recipe.quantizes else recipe.model.dtype], recipe.machine.gpus_per_node
    changed = max(1, round(fraction * RUN))
    share = encoded_part(fraction, itemsize)
    bound = entropy_bytes(RUN, changed, itemsize) / (RUN * itemsize)
    received = int(traffic.traffic.sum())
    bitmaps = traffic.held / itemsize / 8
    wire = estimate_sync_time(traffic.traffic * share, traffic.local * share, hardware, per_node)
    loads = sync_loads(traffic, per_node)
    by_rank = {
        rank: delta_seconds(loads[rank], of_rank, fraction, itemsize, hardware) for rank, of_rank in work.items()
    }
    slowest = max(by_rank, key=lambda rank: by_rank[rank])
    return ChangedSync(
        fraction=fraction,
        delta_bytes=round(received * share),
        delta_bound_bytes=round(received * bound),
        delta_network_bytes=round(network_bytes * share),
        bitmap_bytes=int(np.max(bitmaps)),
        wire=wire,
        seconds=max(by_rank[slowest], wire.seconds),
        encoding_seconds=encoding_seconds(work[slowest], fraction, hardware),
        dense_seconds=_dense_seconds(recipe, traffic, hardware, itemsize),
        work=work[slowest],
    )


def _dense_seconds(recipe: Recipe, traffic: SyncTraffic, hardware: Hardware, itemsize: int) -> float:
    """Return the seconds of a sync of all elements that the optimizer's step does not hide, all but its last bucket."""
    dense = estimate_sync_time(traffic.traffic, traffic.local, hardware, recipe.machine.gpus_per_node).seconds
    moved = traffic.traffic.sum(0) + traffic.traffic.sum(1) + traffic.local
    if not recipe.sync.overlap or not moved.max():
        return dense
    parameters = traffic.held.max() / itemsize / (recipe.train.dp * recipe.train.cp)
    early = max(0.0, 1 - recipe.sync.bucket_bytes / float(moved.max()))
    return dense - hidden_seconds(dense, early, parameters, hardware)


def sync_loads(traffic: SyncTraffic, ranks_per_node: int) -> list[SyncLoad]:
    """Return by rank the bytes that it moves in a sync of all elements."""
    far = inter_node_bytes(traffic.traffic, ranks_per_node)
    near = traffic.traffic - far
    columns = near.sum(1), near.sum(0), far.sum(1), far.sum(0), traffic.local
    return [SyncLoad(*map(float, row)) for row in zip(*columns, strict=True)]


def count_work(recipe: Recipe, answers: EngineAnswers, traffic: SyncTraffic) -> dict[int, EncodingWork]:
    """Count the work of each rank; of a plan that is too large, of the ranks with most bytes and with most peers.

    Of such a plan each layer counts as often as it stands for others, and buckets end where one of these ranks is full.
    """
    demand = traffic.placement.demand([slot.demand for slot in answers.slots])
    groups = rank_groups(answers.holdings), rank_groups(demand)
    routes = Routes(*groups, recipe.sync.bucket_bytes, recipe.machine.gpus_per_node, relays=True)
    ranks = range(recipe.sync_ranks) if answers.all_layers else _busiest_ranks(traffic)
    pieces = LocalPieces(
        {rank: answers.holdings[rank] for rank in ranks if rank in answers.holdings},
        {rank: demand[rank] for rank in ranks if rank in demand},
    )
    transfers = {rank: routes.rank_transfers(rank, pieces) for rank in ranks}
    boundaries = routes.bucket_boundaries(transfers.values())
    return {
        rank: count_encoding(routes.plan(rank, of_rank, boundaries), answers.multiplicity.keys(), answers.multiplicity)
        for rank, of_rank in transfers.items()
    }


def _busiest_ranks(traffic: SyncTraffic) -> list[int]:
    """Return the ranks that send most, receive most, and exchange messages with most others."""
    matrix = traffic.traffic
    peers = (matrix > 0).sum(0) + (matrix > 0).sum(1)
    return sorted({int(numbers.argmax()) for numbers in (matrix.sum(0), matrix.sum(1), peers)})
