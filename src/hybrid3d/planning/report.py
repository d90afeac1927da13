"""Makes the report of `hybrid3d plan`, and the numbers that `--json` prints."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hybrid3d.config import Recipe
from hybrid3d.families import Config, family_of
from hybrid3d.inputs.adapters import check_adapted_layers
from hybrid3d.planning import estimates
from hybrid3d.planning.engine_queries import ProgressCallback, query_engines
from hybrid3d.planning.fitting import check_memory
from hybrid3d.planning.hardware import Hardware, hardware_of
from hybrid3d.planning.memory import FLOAT32, MemoryEstimate, StageMemory, choose_sharding, max_over_stages
from hybrid3d.planning.traffic import SyncTraffic, compute_sync_traffic, without_collector
from hybrid3d.reshard.plan.layout import ITEMSIZE
from hybrid3d.reshard.plan.placement import consecutive_slots
from hybrid3d.train.megatron.probe import expected_shapes

# Bytes of a pickled token: its number, and its text
PROMPT_TOKEN = 4 + 4
# The same, its log-probability, and whether the policy generated it; the versions of weights are few
ANSWER_TOKEN = PROMPT_TOKEN + 4 + 1
ANSWER = 500  # of an answer besides its tokens
MANY_EXPERTS = 256  # more have numbers of two bytes
SAVED = 3 * FLOAT32  # bytes of an element in a checkpoint: the main weight and Adam's two moments


@dataclass(frozen=True)
class PlanReport:
    """Traffic, memory and predicted sync time of a recipe."""

    recipe: Recipe
    hardware: Hardware
    traffic: SyncTraffic
    sync: estimates.SyncTime
    memory: MemoryEstimate
    gather_traffic: estimates.GatherTraffic
    samples: SampleTraffic
    changed: estimates.ChangedSync | None = None
    adapters: estimates.AdapterSync | None = None

    @property
    def checkpoint(self) -> CheckpointMemory:
        """The host memory of a node that writing a checkpoint takes."""
        return estimate_checkpoint(self.recipe, self.memory.stages, self.hardware)

    @property
    def per_rank(self) -> dict[str, np.ndarray]:
        traffic, per_node = self.traffic.traffic, self.recipe.machine.gpus_per_node
        return {
            "wanted_bytes": self.traffic.wanted,
            "held_bytes": self.traffic.held,
            "local_bytes": self.traffic.local,
            "received_bytes": traffic.sum(0),
            "received_over_network_bytes": estimates.inter_node_bytes(traffic, per_node).sum(0),
            "sent_bytes": traffic.sum(1),
            "gather_bytes": self.gather_traffic.received_bytes,
        }

    def traffic_with_slots(self, slots: np.ndarray) -> dict[str, int]:
        """Return the received bytes, and those that no rank of the receiver's node holds, if ranks have these slots."""
        missing = self.traffic.placement.missing
        within = slots % missing.by_group.shape[1]
        return {"received_bytes": missing.received_bytes(within), "far_bytes": missing.network_bytes(within)}

    def numbers(self) -> dict[str, Any]:
        """Return the numbers of `--json`: sums over ranks, or maxima for keys that start with `max_`; sizes in bytes.

        They equal what a run measures, with these exceptions: `max_finalize_bytes`, `samples_bytes` and
        `max_samples_bytes` are upper bounds, `gather_bytes` is what ranks would receive if every tensor were gathered
        on every rank, and `seconds` and `memory` are predictions. If the plan is too large to be made transfer by
        transfer, `max_staging_bytes` is an upper bound too, and `buckets` is null.
        """
        traffic, ranks, changed, adapters = self.traffic, self.per_rank, self.changed, self.adapters
        usual, reserve = consecutive_slots(self.recipe.generation_ranks), self.memory.reserve
        sums = {key: int(ranks[key].sum()) for key in ranks if key != "sent_bytes"}
        return {
            "name": self.recipe.name,
            "ranks": self.recipe.sync_ranks,
            "generation_ranks": self.recipe.generation_ranks,
            **sums,
            "unquantized_bytes": traffic.unquantized,
            "lower_bound_bytes": int(traffic.lower_bound.sum()),
            "network_bytes": sums["received_over_network_bytes"],
            "network_bound_bytes": traffic.network_bound,
            "max_received_bytes": int(ranks["received_bytes"].max()),
            "max_sent_bytes": int(ranks["sent_bytes"].max()),
            "max_staging_bytes": traffic.staging,
            "max_finalize_bytes": traffic.finalize,
            "optimizer_sharding": self.checkpoint.sharding,
            "samples_bytes": int(self.samples.received.sum()),
            "max_samples_bytes": int(self.samples.received.max()),
            "coverage": "exact",
            "buckets": traffic.buckets,
            "per_rank": {key: _spread(of_ranks) for key, of_ranks in ranks.items()},
            "placement": self.traffic_with_slots(traffic.placement.slots)
            | {"consecutive": self.traffic_with_slots(usual)},
            "seconds": {
                "sync": self.sync.seconds,
                "bottleneck": self.sync.bottleneck,
                "network": self.sync.network,
                "nvlink": self.sync.nvlink,
                "copies": self.sync.copies,
                "gather": self.gather_traffic.seconds(self.hardware),
                **({} if changed is None else _changed_seconds(changed)),
                **({} if adapters is None else {"adapters": adapters.time.seconds}),
            },
            "memory": {
                "gpu": self.memory.capacity,
                "train": self.memory.train,
                "sync": self.memory.sync,
                "generate": self.memory.generate,
                **{f"max_{key}": n for key, n in max_over_stages(self.memory.stages).items()},
                "max_node_checkpoint": self.checkpoint.node,
                "reserve_contexts": reserve.contexts,
                "reserve_communicators": reserve.training_communicators + reserve.rollout_communicators,
                "reserve_graphs": reserve.graphs,
                "kv_cache": self.memory.kv_cache,
                "kv_cache_tokens": self.memory.kv_tokens,
            },
            **({} if changed is None else _changed_numbers(changed, self.recipe)),
            **({} if adapters is None else _adapter_numbers(adapters)),
        }


def _changed_seconds(changed: estimates.ChangedSync) -> dict[str, float]:
    return {
        "delta": changed.seconds,
        "delta_wire": changed.wire.seconds,
        "delta_encoding": changed.encoding_seconds,
        "sync_exposed": changed.dense_seconds,
    }


def _changed_numbers(changed: estimates.ChangedSync, recipe: Recipe) -> dict[str, Any]:
    return {
        "changed_fraction": changed.fraction,
        "delta_bytes": changed.delta_bytes,
        "delta_bound_bytes": changed.delta_bound_bytes,
        "delta_network_bytes": changed.delta_network_bytes,
        "max_bitmap_bytes": changed.bitmap_bytes,
        "max_delta_launches": round(changed.work.launches),
        "max_delta_host_waits": round(changed.work.host_waits),
        "max_delta_touched_bytes": round(changed.work.moved_bytes(changed.fraction)),
        "delta_chosen": changed.is_faster and recipe.can_sync_changes,
    }


def _adapter_numbers(adapters: estimates.AdapterSync) -> dict[str, int]:
    return {
        "adapter_received_bytes": adapters.received_bytes,
        "adapter_lower_bound_bytes": adapters.lower_bound_bytes,
        "adapter_network_bytes": adapters.network_bytes,
    }


@without_collector()
def make_report(
    recipe: Recipe,
    config: Config,
    on_progress: ProgressCallback = lambda what: None,
    changed_fraction: float | None = None,
) -> PlanReport:
    """Check the memory of a recipe, query the engines, and plan its sync.

    Args:
        changed_fraction: also predict a sync of so many changed elements.
        on_progress: called with a description of each stage; large plans take half a minute.

    Raises:
        RecipeError: the recipe does not fit the machine's memory, or names layers that cannot have adapters.
        PlanError: holdings and demands do not match.
        UnsupportedModel: an engine treats a tensor in a way that cannot be planned.
    """
    if recipe.lora is not None:
        check_adapted_layers(recipe, expected_shapes(config))
    memory = check_memory(recipe, config, on_progress)
    answers = query_engines(recipe, config, on_progress)
    on_progress("placing ranks, planning, and checking that every wanted element arrives once")
    traffic, hardware = compute_sync_traffic(recipe, answers), hardware_of(recipe.machine)
    sync = estimates.estimate_sync_time(traffic.traffic, traffic.local, hardware, recipe.machine.gpus_per_node)
    gathered, samples = estimates.gather_traffic(recipe, traffic), predict_samples(recipe, config)
    report = PlanReport(recipe, hardware, traffic, sync, memory, gathered, samples)
    if recipe.syncs_adapters:
        slots = traffic.placement.slots.tolist()
        report = replace(report, adapters=estimates.predict_adapter_sync(recipe, config, slots, hardware, on_progress))
    if changed_fraction is None:
        return report
    on_progress("counting what a sync of changed elements takes")
    work = estimates.count_work(recipe, answers, traffic)
    return replace(report, changed=estimates.predict_changed_sync(recipe, traffic, hardware, changed_fraction, work))


def _spread(of_ranks: np.ndarray) -> dict[str, float]:
    return {"min": int(of_ranks.min()), "mean": float(of_ranks.mean()), "max": int(of_ranks.max())}


@dataclass(frozen=True)
class SampleTraffic:
    """The samples of a step.

    Attributes:
        answers: how many there are.
        answer_bytes: of all of them, without choices of experts.
        choice_bytes: of all choices of experts; 0 unless they are replayed.
        received: [ranks], what each rank receives.
    """

    answers: int
    answer_bytes: int
    choice_bytes: int
    received: np.ndarray


def predict_samples(recipe: Recipe, config: Config) -> SampleTraffic:
    """Predict what each rank receives of a step's samples, of one batch of prompts.

    Every rank that trains gets each answer once, except for those that it has generated for its replica, and the ranks
    of a data-parallel rank get the choices of experts of its share. Ranks that only generate get nothing. Answers are
    taken to be as long as the recipe allows, so that these are upper bounds; what is sent is pickled
    (`generation/exchange.py`).
    """
    rollout, algorithm = recipe.rollout, recipe.algorithm
    assert rollout is not None, "there is no sync to plan without"
    if not algorithm.generates:
        return SampleTraffic(0, 0, 0, np.zeros(recipe.sync_ranks, np.int64))
    answers = algorithm.prompts_per_step * (algorithm.samples_per_prompt + algorithm.uses_greedy_answers)
    tokens = min(rollout.max_new_tokens, rollout.max_model_len)
    prompt = rollout.max_model_len - tokens
    answer_bytes = answers * (ANSWER + prompt * PROMPT_TOKEN + tokens * ANSWER_TOKEN)
    experts = family_of(config).experts(config)
    choice_bytes = 0
    if recipe.train.router_replay == "rollout" and experts is not None:
        numbers = sum(experts.sparse) * experts.per_token * (1 if experts.count <= MANY_EXPERTS else 2)
        choice_bytes = answers * (rollout.max_model_len - 1) * numbers
    received = np.zeros(recipe.sync_ranks, np.int64)
    received[: recipe.train_ranks] = answer_bytes + math.ceil(choice_bytes / recipe.train.dp)
    if recipe.is_split:  # the first rank gets everything from the engines
        received[0] = answer_bytes + choice_bytes
    else:  # a rank of each replica has its answers; which one it is depends on the placement
        received[:: rollout.tp] -= answer_bytes // (recipe.generation_ranks // rollout.tp)
    return SampleTraffic(answers, answer_bytes, choice_bytes, received)


@dataclass(frozen=True)
class CheckpointMemory:
    """Host memory in bytes that a checkpoint takes on the fullest node.

    Attributes:
        sharding: how optimizers are saved.
        node: what that takes.
        gathered: what `fully_reshardable` takes.
        capacity: the memory of a node.
    """

    sharding: str
    node: int
    gathered: int
    capacity: int


def estimate_checkpoint(recipe: Recipe, stages: Sequence[StageMemory], hardware: Hardware) -> CheckpointMemory:
    """Estimate what a checkpoint takes, if a node had ranks of the fullest stage only.

    `fully_reshardable` makes the optimizer state of its whole data-parallel group in each rank's host memory: three
    float32 numbers for each element that the rank trains, whatever the number of data-parallel ranks. With
    `dp_reshardable` each rank has its own shard there. Both have the rank's trained weights, too.
    """
    ranks = min(recipe.machine.gpus_per_node, recipe.train_ranks)
    kept = FLOAT32 * (2 if ITEMSIZE[recipe.model.dtype] == FLOAT32 else 3)  # bytes of an element's state on the GPU
    trained = [stage.gradients // FLOAT32 for stage in stages]  # elements
    weights = [ITEMSIZE[recipe.model.dtype] * elements for elements in trained]
    gathered = ranks * max(saved + SAVED * elements for saved, elements in zip(weights, trained, strict=True))
    shards = ranks * max(saved + s.optimizer * SAVED // kept for saved, s in zip(weights, stages, strict=True))
    sharding = choose_sharding(recipe.run.optimizer_sharding, ranks * SAVED * max(trained), hardware.host_bytes)
    node = gathered if sharding == "fully_reshardable" else shards
    return CheckpointMemory(sharding, node, gathered, int(hardware.host_bytes))
