"""Computes and checks the traffic of a recipe's sync: the bytes between each pair of ranks."""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hybrid3d.config import Recipe
from hybrid3d.families import is_expert, is_quantized
from hybrid3d.planning.engine_queries import EngineAnswers, Placement, compute_placement
from hybrid3d.reshard.fp8 import BLOCK, FP8, SCALE, SCALE_SUFFIX
from hybrid3d.reshard.plan.classes import group_ranks, rank_groups, select_tensors
from hybrid3d.reshard.plan.coverage import check_coverage, check_routes, lower_bound, network_lower_bound
from hybrid3d.reshard.plan.layout import ITEMSIZE, Demand, Holdings, Piece, Shape
from hybrid3d.reshard.plan.planner import PlanError, make_plan
from hybrid3d.reshard.plan.relays import Relay
from hybrid3d.reshard.plan.routes import RoutedClass, route_classes


@dataclass(frozen=True)
class SyncTraffic:
    """The bytes of a recipe's sync, computed before ranks start.

    Attributes:
        held, wanted: bytes, [ranks].
        held_experts: the part of `held` that belongs to routed experts, [ranks].
        traffic: bytes by sender and receiver, [ranks, ranks], without those that stay on their rank.
        local: bytes that are copied within a rank, [ranks].
        lower_bound: the fewest bytes that each rank must receive, computed independently of the routes, [ranks].
        network_bound: the fewest bytes that must reach all nodes from other nodes, computed in the same way.
        model, model_experts: bytes of all canonical tensors as they are sent, and of those of routed experts.
        unquantized: what `wanted` would be, over all ranks, without quantization.
        placement: the slot of each rank that generates.
        finalize: an upper bound of the memory that finalization needs on a rank.
        buckets, staging: the maximum over ranks of the number of buckets and of the bytes of staging. If the plan
            is too large to be made transfer by transfer, `buckets` is None and `staging` an upper bound.
    """

    held: np.ndarray
    held_experts: np.ndarray
    wanted: np.ndarray
    traffic: np.ndarray
    local: np.ndarray
    lower_bound: np.ndarray
    network_bound: int
    model: int
    model_experts: int
    unquantized: int
    placement: Placement
    finalize: int
    buckets: int | None
    staging: int


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """Disable garbage collection, which takes a third of the time of a large plan and finds no cycles in it."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


@without_collector()
def compute_sync_traffic(recipe: Recipe, answers: EngineAnswers, slots: Sequence[int] | None = None) -> SyncTraffic:
    """Place the ranks, route every tensor, and check the routes.

    Args:
        slots: the slot of each rank that generates, if it is given; chosen here by default.

    Raises:
        PlanError: holdings and demands do not match.
    """
    world, per_node = recipe.sync_ranks, recipe.machine.gpus_per_node
    holdings, wanted = answers.holdings, [slot.demand for slot in answers.slots]
    found = compute_placement(recipe, answers)
    if slots is not None:
        found = replace(found, slots=np.array(slots))
    demand = found.demand(wanted)
    routed = _routed(found, recipe, len(wanted))
    counts = {tensors.names[0]: tensors.count for tensors in found.classes}  # one tensor for each class
    selected = select_tensors(holdings, counts), select_tensors(demand, counts)
    groups = rank_groups(selected[0]), rank_groups(selected[1])
    check_routes(routed, *groups)
    traffic, local = _traffic(routed, world)
    bound = lower_bound(*selected, counts)
    wanted_bytes = _nbytes(demand, world, answers.multiplicity)
    mismatched = np.flatnonzero(traffic.sum(0) + local != wanted_bytes)
    if mismatched.size:  # the classes, which all of the above uses, have lost or duplicated a tensor
        rank = int(mismatched[0])
        raise PlanError(f"rank {rank} wants {wanted_bytes[rank]} bytes, {traffic.sum(0)[rank] + local[rank]} arrive")
    bucket = recipe.sync.bucket_bytes
    plan = make_plan(holdings, demand, bucket, per_node, relays=True) if answers.all_layers else {}
    check_coverage(plan, holdings, demand if plan else {})
    sizes = {name: _size_sent(recipe, name, shape) for name, shape in answers.shapes.items()}
    return SyncTraffic(
        held=_nbytes(holdings, world, answers.multiplicity),
        held_experts=_nbytes(holdings, world, answers.multiplicity, is_expert),
        wanted=wanted_bytes,
        traffic=traffic,
        local=local,
        lower_bound=np.array([bound.get(rank, 0) for rank in range(world)]),
        network_bound=sum(network_lower_bound(*groups, per_node, counts).values()),
        model=sum(sizes.values()),
        model_experts=sum(nbytes for name, nbytes in sizes.items() if is_expert(name)),
        unquantized=int(_nbytes(demand, world, answers.multiplicity, itemsize=_itemsize_unquantized(recipe)).sum()),
        placement=found,
        finalize=max(slot.finalize_bytes for slot in answers.slots),
        buckets=max(len(part.buckets) for part in plan.values()) if plan else None,
        staging=max(sum(part.staging_bytes) for part in plan.values()) if plan else 2 * bucket,
    )


def _routed(found: Placement, recipe: Recipe, slots: int) -> list[RoutedClass]:
    per_node = recipe.machine.gpus_per_node
    routed = list(route_classes(found.classes, found.holders, found.readers(slots), per_node, relays=True))
    for routed_class in routed:
        for route in routed_class.routes:
            if route.missing:
                name, box, rank = routed_class.tensors.names[0], route.missing[0], route.readers[0]
                raise PlanError(f"{name} {list(box.start)} + {list(box.size)}, wanted by rank {rank}: no rank holds it")
    return routed


def _traffic(routed: Sequence[RoutedClass], world: int) -> tuple[np.ndarray, np.ndarray]:
    """Return bytes by sender and receiver, [ranks, ranks], and bytes that stay on their rank, [ranks]."""
    traffic, local = np.zeros((world, world), np.int64), np.zeros(world, np.int64)
    for routed_class in routed:
        for source in routed_class.sources:
            senders, readers, nbytes = source.traffic(routed_class.tensors.count)
            np.add.at(traffic, (senders, readers), nbytes)
        for route in routed_class.routes:
            readers, count = np.array(route.readers), routed_class.tensors.count
            for part in (part for parts in route.parts.values() for part in parts):
                if part.source is None:
                    local[readers] += part.nbytes * count
                elif isinstance(part.source, Relay):
                    senders = np.array([part.source.sender(reader, 0) for reader in route.readers])
                    traffic[senders, readers] += part.nbytes * count
    return traffic, local


def _size_sent(recipe: Recipe, name: str, shape: Shape) -> int:
    """Return the bytes of a tensor of the checkpoint as a sync sends it."""
    if not recipe.quantizes or not is_quantized(name):
        return math.prod(shape) * ITEMSIZE[recipe.model.dtype]
    return math.prod(shape) * ITEMSIZE[FP8] + math.prod(-(-n // BLOCK) for n in shape) * ITEMSIZE[SCALE]


def _itemsize_unquantized(recipe: Recipe) -> Callable[[Piece], int]:
    """Return a function that returns the bytes of an element of a piece without quantization; scales have none."""
    return lambda piece: (
        ITEMSIZE[recipe.model.dtype]
        if piece.dtype == FP8
        else ITEMSIZE[piece.dtype] * (not piece.name.endswith(SCALE_SUFFIX))
    )


def _nbytes(
    answers: Mapping[int, Holdings] | Mapping[int, Demand],
    world: int,
    multiplicity: Mapping[str, int],
    counts: Callable[[str], bool] = lambda name: True,
    itemsize: Callable[[Piece], int] = lambda piece: ITEMSIZE[piece.dtype],
) -> np.ndarray:
    found = np.zeros(world, np.int64)
    sides: Mapping[int, Any] = answers
    for ranks, side in group_ranks(sides):
        pieces = (piece for piece in side.pieces if counts(piece.name))
        found[ranks] = sum(piece.box.numel * itemsize(piece) * multiplicity[piece.name] for piece in pieces)
    return found
