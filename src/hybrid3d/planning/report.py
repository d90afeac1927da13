"""A recipe's plan as numbers: what `hybrid3d plan --json` prints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hybrid3d.config import Recipe
from hybrid3d.families import Config
from hybrid3d.planning.engine_queries import Say, query_engines
from hybrid3d.planning.fitting import check_memory
from hybrid3d.planning.hardware import Hardware, hardware_of
from hybrid3d.planning.memory import Memory, fullest
from hybrid3d.planning.peers import GatherTraffic, gathered
from hybrid3d.planning.seconds import Prediction, over_network, predict
from hybrid3d.planning.traffic import PlannedTraffic, planned
from hybrid3d.reshard.placement import consecutive


@dataclass(frozen=True)
class Report:
    """All that is known of a recipe's run before it starts."""

    recipe: Recipe
    hardware: Hardware
    traffic: PlannedTraffic
    sync: Prediction
    memory: Memory
    gathered: GatherTraffic

    @property
    def per_rank(self) -> dict[str, np.ndarray]:
        traffic, per_node = self.traffic.traffic, self.recipe.machine.gpus_per_node
        return {
            "wanted_bytes": self.traffic.wanted,
            "held_bytes": self.traffic.held,
            "local_bytes": self.traffic.local,
            "received_bytes": traffic.sum(0),
            "received_over_network_bytes": over_network(traffic, per_node).sum(0),
            "sent_bytes": traffic.sum(1),
            "gather_bytes": self.gathered.received,
        }

    def moved_if(self, slots: np.ndarray) -> dict[str, int]:
        """Bytes received, and over the network, where ranks have these slots."""
        lacks = self.traffic.placement.lacks
        within = slots % lacks.by_group.shape[1]
        return {"received_bytes": lacks.received(within), "network_bytes": lacks.over_network(within)}

    def numbers(self) -> dict[str, Any]:
        """Sums over ranks, except where a key starts with `max_`. Sizes are bytes.

        All is what a run then measures, but for these: `max_finalize_bytes` is a bound, `gather_bytes` what ranks would
        receive if every tensor were rebuilt on every rank, and `seconds` and `memory` are models. Where the plan is too
        large to be made transfer by transfer, `max_staging_bytes` is a bound too, and `buckets` is null.
        """
        traffic, ranks = self.traffic, self.per_rank
        usual = consecutive(self.recipe.world_size)
        sums = {key: int(ranks[key].sum()) for key in ranks if key != "sent_bytes"}
        return {
            "name": self.recipe.name,
            "ranks": self.recipe.world_size,
            **sums,
            "lower_bound_bytes": int(traffic.lower_bound.sum()),
            "max_received_bytes": int(ranks["received_bytes"].max()),
            "max_sent_bytes": int(ranks["sent_bytes"].max()),
            "max_staging_bytes": traffic.staging,
            "max_finalize_bytes": traffic.finalize,
            "coverage": "exact",
            "buckets": traffic.buckets,
            "per_rank": {key: _spread(of_ranks) for key, of_ranks in ranks.items()},
            "placement": self.moved_if(traffic.placement.slots) | {"consecutive": self.moved_if(usual)},
            "seconds": {
                "sync": self.sync.seconds,
                "bottleneck": self.sync.bottleneck,
                "network": self.sync.network,
                "nvlink": self.sync.nvlink,
                "copies": self.sync.copies,
                "gather": self.gathered.seconds(self.hardware),
            },
            "memory": {
                "gpu": self.memory.capacity,
                "train": self.memory.train,
                "sync": self.memory.sync,
                "generate": self.memory.generate,
                **{f"max_{key}": n for key, n in fullest(self.memory.stages).items()},
                "kv_cache": self.memory.kv_cache,
                "kv_cache_tokens": self.memory.kv_tokens,
            },
        }


def report(recipe: Recipe, config: Config, say: Say = lambda what: None) -> Report:
    """Plan a recipe that fits.

    Args:
        say: is told what is being done: large plans take half a minute.

    Raises:
        RecipeError: it does not fit into the machine's memory.
        PlanError: what is held and what is wanted do not fit each other.
        UnsupportedModel: an engine does with a tensor what cannot be planned.
    """
    memory = check_memory(recipe, config, say)
    sides = query_engines(recipe, config, say)
    say("placing ranks, planning, and checking that every wanted element arrives once")
    traffic, hardware = planned(recipe, sides), hardware_of(recipe.machine)
    sync = predict(traffic.traffic, traffic.local, hardware, recipe.machine.gpus_per_node)
    return Report(recipe, hardware, traffic, sync, memory, gathered(recipe, traffic))


def _spread(of_ranks: np.ndarray) -> dict[str, float]:
    return {"min": int(of_ranks.min()), "mean": float(of_ranks.mean()), "max": int(of_ranks.max())}
