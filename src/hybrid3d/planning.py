"""`hybrid3d plan`: what a recipe's syncs will move, computed from the engines' own code without starting ranks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from hybrid3d.config import Recipe
from hybrid3d.families import Config
from hybrid3d.reshard.coverage import check_nothing_idle, lower_bound
from hybrid3d.reshard.layout import ITEMSIZE, Demand, Holdings
from hybrid3d.reshard.planner import Plan
from hybrid3d.reshard.stamp import alike, distinct, only
from hybrid3d.rollout.probe import demand_of_all
from hybrid3d.sync import plan_sync
from hybrid3d.train.probe import holdings_of_all
from hybrid3d.train.weights import canonical_shapes

# Of more pieces than this, only one tensor of each class is planned: the whole plan would take hours.
WHOLE_PLAN = 100_000


def plan_of(recipe: Recipe, config: Config, say: Callable[[str], None] = lambda what: None) -> dict[str, Any]:
    """The numbers of a recipe's sync: sums over ranks, except where a key starts with `max_`. Sizes are bytes.

    All is what a run then measures, but for these: `max_finalize_bytes` is a bound; `gather_bytes` is what ranks would
    receive if every tensor were rebuilt on every rank; and where the plan is too large to be made whole,
    `max_staging_bytes` is a bound too, and `buckets` is null.

    Args:
        say: is told what is being done: large plans take a minute.
    """
    say(f"asking Megatron what {recipe.world_size} ranks hold")
    holdings = holdings_of_all(config, recipe)
    shapes = canonical_shapes([piece for held in holdings.values() for piece in held.pieces])
    say(f"asking vLLM what {recipe.world_size} ranks want")
    asked = demand_of_all(config, recipe, shapes)
    demand = {rank: answer.demand for rank, answer in asked.items()}
    say("planning, and checking that every wanted element arrives once")
    whole = sum(len(side.pieces) for side in demand.values()) <= WHOLE_PLAN
    times = dict.fromkeys(shapes, 1) if whole else alike(holdings, demand)
    check_nothing_idle(holdings, demand)
    part = (holdings, demand) if whole else (only(holdings, times), only(demand, times))
    plan = plan_sync(recipe, *part)
    moved = _Bytes.of(plan, times)
    bound = lower_bound(*part, times)
    held, wanted = _nbytes(holdings), _nbytes(demand)
    itemsize = ITEMSIZE[recipe.model.dtype]
    model = sum(math.prod(shape) * itemsize for shape in shapes.values())
    return {
        "name": recipe.name,
        "ranks": recipe.world_size,
        "wanted_bytes": sum(wanted.values()),
        "held_bytes": sum(held.values()),
        "local_bytes": sum(moved.local.values()),
        "received_bytes": sum(moved.received.values()),
        "lower_bound_bytes": sum(bound.values()),
        "max_received_bytes": max(moved.received.values(), default=0),
        "max_sent_bytes": max(moved.sent.values(), default=0),
        "gather_bytes": sum(model - nbytes for nbytes in held.values()),
        "max_staging_bytes": max(plan.staging_bytes(rank) for rank in demand) if whole else 2 * plan.bucket_bytes,
        "max_finalize_bytes": max(answer.finalize_bytes for answer in asked.values()),
        "coverage": "exact",
        "buckets": len(plan.buckets) if whole else None,
        "seconds": {},
        "memory": {"max_train_weights": max(held.values()), "max_rollout_weights": max(wanted.values())},
    }


@dataclass(frozen=True)
class _Bytes:
    """By rank: what stays, what comes and what goes, where a tensor that is planned stands for others."""

    local: dict[int, int]
    received: dict[int, int]
    sent: dict[int, int]

    @classmethod
    def of(cls, plan: Plan, times: Mapping[str, int]) -> _Bytes:
        local, received, sent = defaultdict(int), defaultdict(int), defaultdict(int)
        for t in plan.transfers:
            nbytes = t.nbytes * times[t.target.name]
            if t.is_local:
                local[t.dst] += nbytes
            else:
                received[t.dst] += nbytes
                sent[t.src] += nbytes
        return cls(local, received, sent)


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
