"""`hybrid3d plan`: what a recipe's syncs will move, computed from the engines' own code without starting ranks."""

from __future__ import annotations

import contextlib
import gc
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.table import Table

from hybrid3d.config import Recipe
from hybrid3d.families import Config
from hybrid3d.reshard.box import Box
from hybrid3d.reshard.coverage import check_same_tensors, lower_bound
from hybrid3d.reshard.layout import ITEMSIZE, Demand, Holdings
from hybrid3d.reshard.planner import Plan, sums
from hybrid3d.reshard.stamp import alike, distinct, only
from hybrid3d.rollout.probe import demand_of_all
from hybrid3d.sync import plan_sync
from hybrid3d.train.probe import holdings_of_all
from hybrid3d.train.weights import canonical_shapes

# Of more pieces than this, only one tensor of each class is planned: the whole plan would take minutes, or hours.
WHOLE_PLAN = 50_000


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
def plan_of(recipe: Recipe, config: Config, say: Callable[[str], None] = lambda what: None) -> dict[str, Any]:
    """The numbers of a recipe's sync: sums over ranks, except where a key starts with `max_`. Sizes are bytes.

    All is what a run then measures, but for these: `max_finalize_bytes` is a bound, and `gather_bytes` is what ranks
    would receive if every tensor were rebuilt on every rank. Where the plan is too large to be made whole,
    `max_staging_bytes` is a bound too, `max_sent_bytes` takes it that replicas share evenly, and `buckets` is null.

    Args:
        say: is told what is being done: large plans take a minute.

    Raises:
        PlanError: what is held and what is wanted do not fit each other.
        UnsupportedModel: an engine does with a tensor what cannot be planned.
    """
    say(f"asking Megatron what {recipe.world_size} ranks hold")
    holdings = holdings_of_all(config, recipe)
    shapes = canonical_shapes([piece for held in holdings.values() for piece in held.pieces])
    say(f"asking vLLM what {recipe.world_size} ranks want")
    asked = demand_of_all(config, recipe, shapes)
    demand = {rank: answer.demand for rank, answer in asked.items()}
    say("planning, and checking that every wanted element arrives once")
    check_same_tensors(holdings, demand)
    whole = sum(len(side.pieces) for side in demand.values()) <= WHOLE_PLAN
    times = dict.fromkeys(shapes, 1) if whole else alike(holdings, demand)
    part = (holdings, demand) if whole else (only(holdings, times), only(demand, times))
    plan = plan_sync(recipe, *part)
    sent = plan.sent_bytes if whole else _sent_evenly(plan, part[0], times, recipe.machine.gpus_per_node)
    local = sums((t.dst, t.nbytes * times[t.target.name]) for t in plan.transfers if t.is_local)
    received = sums((t.dst, t.nbytes * times[t.target.name]) for t in plan.transfers if not t.is_local)
    held, wanted = _nbytes(holdings), _nbytes(demand)
    itemsize = ITEMSIZE[recipe.model.dtype]
    model = sum(math.prod(shape) * itemsize for shape in shapes.values())
    return {
        "name": recipe.name,
        "ranks": recipe.world_size,
        "wanted_bytes": sum(wanted.values()),
        "held_bytes": sum(held.values()),
        "local_bytes": sum(local.values()),
        "received_bytes": sum(received.values()),
        "lower_bound_bytes": sum(lower_bound(*part, times).values()),
        "max_received_bytes": max(received.values(), default=0),
        "max_sent_bytes": round(max(sent.values(), default=0)),
        "gather_bytes": sum(model - nbytes for nbytes in held.values()),
        "max_staging_bytes": max(plan.staging_bytes.values()) if whole else 2 * plan.bucket_bytes,
        "max_finalize_bytes": max(answer.finalize_bytes for answer in asked.values()),
        "coverage": "exact",
        "buckets": len(plan.buckets) if whole else None,
        "seconds": {},
        "memory": {"max_train_weights": max(held.values()), "max_rollout_weights": max(wanted.values())},
    }


def _sent_evenly(
    plan: Plan, holdings: Mapping[int, Holdings], times: Mapping[str, int], ranks_per_node: int
) -> dict[int, float]:
    """By rank, the bytes it sends where the replicas that are equally near to a reader share what that reads.

    The plan of one tensor has one replica send it; over the tensors that it stands for, all take their turns.
    """
    holders: dict[tuple[str, Box], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    around: dict[tuple[int, str], list[Box]] = defaultdict(list)
    for rank, side in holdings.items():
        for piece in side.pieces:
            holders[piece.name, piece.box][rank // ranks_per_node].append(rank)
            around[rank, piece.name].append(piece.box)
    sent: dict[int, float] = defaultdict(float)
    for t in plan.transfers:
        if not t.is_local:
            box = next(box for box in around[t.src, t.source.name] if box.contains(t.source.box))
            nodes = holders[t.source.name, box]
            near = nodes.get(t.dst // ranks_per_node)
            sharing = [near] if near else list(nodes.values())
            share = t.nbytes * times[t.target.name] / sum(map(len, sharing))
            for ranks in sharing:
                for rank in ranks:
                    sent[rank] += share
    return sent


def _nbytes(sides: Mapping[int, Holdings] | Mapping[int, Demand]) -> dict[int, int]:
    return {rank: n for ranks, side in distinct(sides) for n in [sum(p.nbytes for p in side.pieces)] for rank in ranks}


def page_of(recipe: Recipe, numbers: dict[str, Any]) -> Table:
    """The plan as a person reads it."""
    train, rollout = recipe.train, recipe.rollout
    assert rollout is not None
    table = Table(title=f"{recipe.name}: one sync, {numbers['ranks']} ranks", show_header=False)
    experts = f", experts EP{train.ep} x ETP{train.etp}" if train.ep * train.etp > 1 else ""
    table.add_row("train layout", f"TP{train.tp} x PP{train.pp} x DP{train.dp}{experts}")
    shared = f", experts EP{rollout.tp * rollout.dp}" if rollout.expert_parallel else ""
    table.add_row("rollout layout", f"TP{rollout.tp} x DP{numbers['ranks'] // rollout.tp}{shared}")
    for key, value in numbers.items():
        if key.endswith("_bytes"):
            table.add_row(key.removesuffix("_bytes").replace("_", " "), f"{value:,} bytes")
    table.add_row("coverage", f"{numbers['coverage']}: every wanted element arrives once, from a rank that holds it")
    return table
