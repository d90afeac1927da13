"""Predicts the syncs after the first one where vLLM gets a policy's adapters alone (`lora.sync=adapter`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybrid3d.config import Recipe
from hybrid3d.families import Config
from hybrid3d.inputs.adapters import adapted_shapes
from hybrid3d.planning.engine_queries import EngineAnswers, ProgressCallback, check_answers
from hybrid3d.planning.hardware import Hardware
from hybrid3d.planning.seconds import SyncTime, estimate_sync_time, inter_node_bytes
from hybrid3d.planning.traffic import compute_sync_traffic
from hybrid3d.reshard.plan.layers import layer_of
from hybrid3d.rollout.probe import adapter_demands
from hybrid3d.train.megatron.probe import adapter_holdings_of_all, expected_shapes, representative_layer_counts


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
