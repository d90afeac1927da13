"""What a recipe's syncs move: who sends how much to whom, computed for every rank and checked."""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hybrid3d.config import Recipe
from hybrid3d.families import is_expert
from hybrid3d.planning.agreed_placement import Placement, compute_placement
from hybrid3d.planning.engine_queries import EngineAnswers
from hybrid3d.reshard.classes import group_ranks, rank_groups, select_tensors
from hybrid3d.reshard.coverage import check_coverage, check_routes, lower_bound
from hybrid3d.reshard.layout import ITEMSIZE, Demand, Holdings
from hybrid3d.reshard.planner import PlanError, make_plan
from hybrid3d.reshard.routes import RoutedClass, route


@dataclass(frozen=True)
class SyncTraffic:
    """A recipe's sync, as far as it is known before ranks start.

    Attributes:
        held, wanted: bytes by rank.
        traffic: bytes by sender and receiver; what stays on its rank is in `local`.
        lower_bound: the fewest bytes that each rank must receive, counted apart.
        held_experts: of what is held, that of routed experts.
        model, model_experts: bytes of all canonical tensors, and of those of routed experts.
        placed: the slot of each rank.
        finalize: a bound on what opened modules take on a rank.
        buckets, staging: the most of a rank, of the plan made transfer by transfer; None, and a bound, where it is too
            large for that.
    """

    held: np.ndarray
    held_experts: np.ndarray
    wanted: np.ndarray
    traffic: np.ndarray
    local: np.ndarray
    lower_bound: np.ndarray
    model: int
    model_experts: int
    placement: Placement
    finalize: int
    buckets: int | None
    staging: int


@contextlib.contextmanager
def _no_collector() -> Iterator[None]:
    """A large plan is millions of objects without a cycle, and looking for cycles a third of its time."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


@_no_collector()
def compute_sync_traffic(recipe: Recipe, answers: EngineAnswers, slots: Sequence[int] | None = None) -> SyncTraffic:
    """Place the ranks and route every tensor; all of it is checked.

    Args:
        slots: of the ranks, where they are placed already.

    Raises:
        PlanError: what is held and what is wanted do not fit each other.
    """
    world, per_node = recipe.world_size, recipe.machine.gpus_per_node
    holdings, wanted = answers.holdings, [one.demand for one in answers.slots]
    found = compute_placement(recipe, holdings, wanted, answers.multiplicity)
    if slots is not None:
        found = replace(found, slots=np.array(slots))
    demand = {rank: wanted[slot % len(wanted)] for rank, slot in enumerate(found.slots)}
    routed = _routed(found, recipe, len(wanted))
    first = {one.names[0]: one.count for one in found.classes}
    part = select_tensors(holdings, first), select_tensors(demand, first)
    check_routes(routed, *map(rank_groups, part))
    traffic, local = _traffic(routed, world)
    bound = lower_bound(*part, first)
    wanted_bytes = _nbytes(demand, answers.multiplicity)
    unlike = np.flatnonzero(traffic.sum(0) + local != wanted_bytes)
    if unlike.size:  # the classes, on which all of the above rests, have lost or doubled a tensor
        rank = int(unlike[0])
        raise PlanError(f"rank {rank} wants {wanted_bytes[rank]} bytes, {traffic.sum(0)[rank] + local[rank]} arrive")
    bucket = recipe.sync.bucket_bytes
    plan = make_plan(holdings, demand, bucket, per_node) if answers.all_layers else {}
    check_coverage(plan, holdings, demand if plan else {})
    sizes = {name: math.prod(shape) * ITEMSIZE[recipe.model.dtype] for name, shape in answers.shapes.items()}
    return SyncTraffic(
        held=_nbytes(holdings, answers.multiplicity),
        held_experts=_nbytes(holdings, answers.multiplicity, is_expert),
        wanted=wanted_bytes,
        traffic=traffic,
        local=local,
        lower_bound=np.array([bound[rank] for rank in range(world)]),
        model=sum(sizes.values()),
        model_experts=sum(nbytes for name, nbytes in sizes.items() if is_expert(name)),
        placement=found,
        finalize=max(one.finalize_bytes for one in answers.slots),
        buckets=max(len(part.buckets) for part in plan.values()) if plan else None,
        staging=max(sum(part.staging_bytes) for part in plan.values()) if plan else 2 * bucket,
    )


def _routed(found: Placement, recipe: Recipe, slots: int) -> list[RoutedClass]:
    routed = list(route(found.classes, found.holders, found.readers(slots), recipe.machine.gpus_per_node))
    for one in routed:
        for way in one.routes:
            if way.missing:
                name, box, rank = one.tensors.names[0], way.missing[0], way.readers[0]
                raise PlanError(f"{name} {list(box.start)} + {list(box.size)}, wanted by rank {rank}: no rank holds it")
    return routed


def _traffic(routed: Sequence[RoutedClass], world: int) -> tuple[np.ndarray, np.ndarray]:
    """Bytes by sender and receiver, and bytes that stay where they are."""
    traffic, local = np.zeros((world, world), np.int64), np.zeros(world, np.int64)
    for one in routed:
        for source in one.sources:
            senders, readers, nbytes = source.traffic(one.tensors.count)
            np.add.at(traffic, (senders, readers), nbytes)
        for way in one.routes:
            parts = [part for several in way.parts.values() for part in several if part.source is None]
            local[list(way.readers)] += sum(part.nbytes for part in parts) * one.tensors.count
    return traffic, local


def _nbytes(
    answers: Mapping[int, Holdings] | Mapping[int, Demand],
    multiplicity: Mapping[str, int],
    counts: Callable[[str], bool] = lambda name: True,
) -> np.ndarray:
    found = np.zeros(len(answers), np.int64)
    for ranks, side in group_ranks(answers):
        found[ranks] = sum(piece.nbytes * multiplicity[piece.name] for piece in side.pieces if counts(piece.name))
    return found
