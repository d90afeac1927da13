"""`hybrid3d plan`: what a recipe's syncs will move, computed from the engines' own code without starting ranks."""

from __future__ import annotations

import math
from typing import Any

from rich.table import Table

from hybrid3d.config import Recipe
from hybrid3d.families import Config
from hybrid3d.reshard.coverage import lower_bound
from hybrid3d.reshard.layout import ITEMSIZE
from hybrid3d.rollout.probe import demand_of_all
from hybrid3d.sync import plan_sync
from hybrid3d.train.probe import holdings_of_all
from hybrid3d.train.weights import canonical_shapes


def plan_of(recipe: Recipe, config: Config) -> dict[str, Any]:
    """The numbers of a recipe's sync: sums over ranks, except where a key starts with `max_`. Sizes are bytes.

    All is what a run then measures, but for two: `max_finalize_bytes` is a bound, and `gather_bytes` is what ranks
    would receive if every tensor were rebuilt on every rank.
    """
    holdings = holdings_of_all(config, recipe)
    shapes = canonical_shapes([piece for held in holdings.values() for piece in held.pieces])
    asked = demand_of_all(recipe, shapes)
    demand = {rank: answer.demand for rank, answer in asked.items()}
    plan = plan_sync(recipe, holdings, demand)
    held = {rank: sum(p.nbytes for p in side.pieces) for rank, side in holdings.items()}
    wanted = {rank: sum(p.nbytes for p in side.pieces) for rank, side in demand.items()}
    itemsize = ITEMSIZE[recipe.model.dtype]
    model = sum(math.prod(shape) * itemsize for shape in shapes.values())
    return {
        "name": recipe.name,
        "ranks": recipe.world_size,
        "wanted_bytes": sum(wanted.values()),
        "held_bytes": sum(held.values()),
        "local_bytes": sum(plan.local_bytes.values()),
        "received_bytes": sum(plan.received_bytes.values()),
        "lower_bound_bytes": sum(lower_bound(holdings, demand).values()),
        "max_received_bytes": max(plan.received_bytes.values(), default=0),
        "max_sent_bytes": max(plan.sent_bytes.values(), default=0),
        "gather_bytes": sum(model - nbytes for nbytes in held.values()),
        "max_staging_bytes": max(plan.staging_bytes(rank) for rank in demand),
        "max_finalize_bytes": max(answer.finalize_bytes for answer in asked.values()),
        "coverage": "exact",
        "buckets": len(plan.buckets),
        "seconds": {},
        "memory": {"max_train_weights": max(held.values()), "max_rollout_weights": max(wanted.values())},
    }


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
