"""Predicts traffic and seconds of syncs, and of the method of other trainers, from plans.

A sync of changed elements (`reshard/delta/executor.py`) is predicted from the plan of a full one: the changed elements
are taken to be spread evenly over all tensors; with `rollout.quantization` all are taken for FP8. Where vLLM gets a
policy's adapters alone (`lora.sync=adapter`), the syncs after the first one are predicted.

The method of other trainers gathers every tensor on every rank. Each stage broadcasts what it holds to the ranks at the
same position of the other stages. All-gathers over TP, and over EP for experts, then complete the tensors on each rank.
Groups within a node use NVLink. Ranks that only generate receive every tensor by a broadcast, which enters each of
their nodes once, while the others still gather.

Seconds are those of every link and every memory at its full bandwidth. Packing, sending and unpacking overlap, and so
do the two directions of a link. The time is therefore that of the busiest resource of the slowest rank. Latencies are
ignored: buckets are large, and two of them are in flight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hybrid3d.config import Recipe
from hybrid3d.families import Config
from hybrid3d.inputs.adapters import adapted_shapes
from hybrid3d.planning.engine_queries import EngineAnswers, ProgressCallback, check_answers
from hybrid3d.planning.hardware import Hardware
from hybrid3d.planning.sync_choice import (
    RUN,
    SyncLoad,
    delta_seconds,
    encoded_part,
    encoding_seconds,
    hidden_seconds,
)
from hybrid3d.planning.traffic import SyncTraffic, compute_sync_traffic
from hybrid3d.reshard.delta.encoding import entropy_bytes
from hybrid3d.reshard.delta.encoding_work import EncodingWork, count_encoding
from hybrid3d.reshard.fp8 import FP8
from hybrid3d.reshard.plan.classes import layer_of, rank_groups
from hybrid3d.reshard.plan.layout import ITEMSIZE, LocalPieces
from hybrid3d.reshard.plan.planner import Routes
from hybrid3d.rollout.probe import adapter_demands
from hybrid3d.train.megatron.probe import adapter_holdings_of_all, expected_shapes, representative_layer_counts


@dataclass(frozen=True)
class SyncTime:
    """The predicted time of a sync: the maximum over ranks of the seconds that each resource is busy.

    Attributes:
        rank: the slowest rank.
    """

    network: float
    nvlink: float
    copies: float
    rank: int

    @property
    def seconds(self) -> float:
        return max(self.network, self.nvlink, self.copies)

    @property
    def bottleneck(self) -> str:
        return max(("network", "nvlink", "copies"), key=lambda name: getattr(self, name))


def estimate_sync_time(traffic: np.ndarray, local: np.ndarray, hardware: Hardware, ranks_per_node: int) -> SyncTime:
    """Predict the time of a sync.

    Args:
        traffic: bytes by sender and receiver, [ranks, ranks].
        local: bytes that each rank copies within its own memory, [ranks].
    """
    far = inter_node_bytes(traffic, ranks_per_node)
    near = traffic - far
    # Sent bytes are packed and received bytes unpacked: each is read and written once at both ends.
    copied = 2 * (local + traffic.sum(0) + traffic.sum(1))
    busy = {
        "network": np.maximum(far.sum(0), far.sum(1)) / hardware.network_bandwidth,
        "nvlink": np.maximum(near.sum(0), near.sum(1)) / hardware.nvlink_bandwidth,
        "copies": copied / hardware.memory_bandwidth,
    }
    slowest = np.maximum.reduce(list(busy.values()))
    return SyncTime(**{name: float(s.max()) for name, s in busy.items()}, rank=int(slowest.argmax()))


def inter_node_bytes(traffic: np.ndarray, ranks_per_node: int) -> np.ndarray:
    """Return the part of the traffic that is between ranks of different nodes."""
    node = np.arange(len(traffic)) // ranks_per_node
    return np.where(node[:, None] == node[None, :], 0, traffic)


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
        """Whether `sync.delta: auto` sends only the changed elements, if the recipe's syncs can."""
        return bool(self.seconds < self.dense_seconds)


def predict_changed_sync(
    recipe: Recipe,
    traffic: SyncTraffic,
    hardware: Hardware,
    fraction: float,
    work: Mapping[int, EncodingWork],
) -> ChangedSync:
    """Predict a sync of the elements that changed.

    Args:
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
        delta_network_bytes=round(int(inter_node_bytes(traffic.traffic, per_node).sum()) * share),
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
    if not recipe.overlaps_sync or not moved.max():
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


@dataclass(frozen=True)
class AdapterSync:
    """A sync of the adapters alone. Sums over ranks, in bytes.

    Attributes:
        received_bytes: that ranks receive.
        lower_bound_bytes: the fewest that they must receive, computed independently of the routes.
        network_bytes: the part of `received_bytes` that comes from other nodes.
        time: the predicted time.
    """

    received_bytes: int
    lower_bound_bytes: int
    network_bytes: int
    time: SyncTime


def predict_adapter_sync(
    recipe: Recipe, config: Config, slots: Sequence[int], hardware: Hardware, on_progress: ProgressCallback
) -> AdapterSync:
    """Predict a sync of the adapters alone.

    Args:
        slots: the slot of each rank that generates, which the model's own weights have decided.

    Raises:
        PlanError: holdings and demands do not match.
        UnsupportedModel: an engine has no adapters of a layer, or shards them in a way that cannot be planned.
    """
    traffic = compute_sync_traffic(recipe, query_adapters(recipe, config, on_progress), slots)
    per_node = recipe.machine.gpus_per_node
    return AdapterSync(
        received_bytes=int(traffic.traffic.sum()),
        lower_bound_bytes=int(traffic.lower_bound.sum()),
        network_bytes=int(inter_node_bytes(traffic.traffic, per_node).sum()),
        time=estimate_sync_time(traffic.traffic, traffic.local, hardware, per_node),
    )


def query_adapters(recipe: Recipe, config: Config, on_progress: ProgressCallback = lambda what: None) -> EngineAnswers:
    """Query Megatron about every rank's adapters and vLLM about every slot's, by one layer of each kind.

    Raises:
        UnsupportedModel: an engine has no adapters of a layer, or shards them in a way that cannot be planned.
    """
    assert recipe.lora is not None, "called where the recipe has adapters"
    shapes, layer_counts = expected_shapes(config), representative_layer_counts(config, recipe.train)
    matrices = adapted_shapes(recipe.lora, shapes)
    on_progress("asking both engines about the adapters")
    holdings = adapter_holdings_of_all(config, recipe, shapes, layer_counts)
    slots = adapter_demands(config, recipe, shapes, matrices, layer_counts)
    multiplicity = {name: layer_counts[layer] for name in matrices if (layer := layer_of(name)) in layer_counts}
    return check_answers(EngineAnswers(matrices, holdings, slots, multiplicity, all_layers=False))


@dataclass(frozen=True)
class GatherTraffic:
    """The bytes that each rank receives from other nodes (`far`) and from its own node (`near`), [ranks]."""

    far: np.ndarray
    near: np.ndarray

    @property
    def received_bytes(self) -> np.ndarray:
        received: np.ndarray = self.far + self.near
        return received

    def seconds(self, hardware: Hardware) -> float:
        """Return the seconds of the slowest rank, with both kinds of links at their full bandwidth at the same time."""
        return float(np.maximum(self.far / hardware.network_bandwidth, self.near / hardware.nvlink_bandwidth).max())


def gather_traffic(recipe: Recipe, traffic: SyncTraffic) -> GatherTraffic:
    """Compute what ranks receive if every tensor is gathered on every rank."""
    train, per_node = recipe.train, recipe.machine.gpus_per_node
    node = (np.arange(recipe.train_ranks) // per_node).reshape(train.pp, -1)
    far, near = (np.zeros(node.shape) for _ in range(2))
    for held, model, group in (
        (traffic.held - traffic.held_experts, traffic.model - traffic.model_experts, train.tp),
        (traffic.held_experts, traffic.model_experts, train.ep * train.etp),
    ):
        of_stage = held[: recipe.train_ranks].reshape(node.shape)
        for stage in range(train.pp):
            broadcast = np.where(np.arange(train.pp)[:, None] == stage, 0, of_stage[stage])
            far += np.where(node != node[stage], broadcast, 0)
            near += np.where(node != node[stage], 0, broadcast)
        rest = np.maximum(model - of_stage.sum(0, keepdims=True), 0)
        inside = min(per_node, group)  # ranks of a group that are on one node
        outside = 1 - (inside - 1) / (group - 1) if group > 1 else 0
        far += outside * rest
        near += (1 - outside) * rest
    generating = np.arange(recipe.train_ranks, recipe.sync_ranks)
    members = np.bincount(generating // per_node)[generating // per_node]
    # A node that also trains has everything already
    broadcast_far = np.where(generating // per_node * per_node < recipe.train_ranks, 0, traffic.model / members)
    far = np.concatenate([far.reshape(-1), broadcast_far])
    near = np.concatenate([near.reshape(-1), traffic.model - broadcast_far])
    return GatherTraffic(far.round().astype(np.int64), near.round().astype(np.int64))
