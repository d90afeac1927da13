"""Train -> rollout: the plan that all ranks agree on, made once, and its execution, every step."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch.distributed as dist

from hybrid3d import ranks
from hybrid3d.config import Recipe
from hybrid3d.reshard.classes import outline_of
from hybrid3d.reshard.coverage import check_arrivals, check_same_tensors, lower_bound
from hybrid3d.reshard.executor import Executor, Tensors
from hybrid3d.reshard.planner import Known, Routes
from hybrid3d.reshard.transport import make_transport
from hybrid3d.rollout.engine import RolloutEngine
from hybrid3d.train.runtime import device, synchronize
from hybrid3d.train.weights import MegatronWeights, canonical_shapes

MIB = 1 << 20


@dataclass(frozen=True)
class SyncReport:
    """One sync on this rank. Bytes are measured by the transport and by what was allocated, not read off the plan."""

    seconds: float
    received_bytes: int
    lower_bound_bytes: int
    staging_bytes: int
    finalize_bytes: int


class WeightSync:
    """Brings a rank's share of the rollout layout up to date with the train layout.

    Raises (when made):
        PlanError: vLLM wants a tensor that Megatron does not hold, or twice the same.
        UnsupportedLoader: vLLM's loader of this model cannot be replayed on shards.
    """

    def __init__(self, recipe: Recipe, trained: MegatronWeights, engine: RolloutEngine, rank: int):
        held = trained.holdings
        holders = ranks.gather_alike(outline_of(held))
        self._engine = engine
        self._sink = engine.weights(canonical_shapes([side for _, side in holders]))
        wanted = self._sink.demand
        readers = ranks.gather_alike(outline_of(wanted))
        check_same_tensors(holders, readers)
        routes = Routes(holders, readers, int(recipe.sync.bucket_mib * MIB), recipe.machine.gpus_per_node)
        moves = routes.moves(rank, Known({rank: held}, {rank: wanted}))
        plan = routes.plan(rank, moves, routes.ends([moves], ranks.least))
        check_arrivals(plan, wanted)
        self._lower_bound = lower_bound({rank: held}, {rank: wanted})[rank]
        self._sink.prepare(plan.layers)
        transport = make_transport(device(), dist.new_group(list(range(recipe.world_size))))
        self._executor = Executor(plan, Tensors(trained.tensors), self._sink, transport, device())

    def run(self) -> SyncReport:
        """Move the weights as they are now; every rank calls this together."""
        start = time.perf_counter()
        self._sink.begin()
        done = self._executor.run()
        self._sink.end()
        self._engine.reset_cache()
        synchronize()
        return SyncReport(
            seconds=time.perf_counter() - start,
            received_bytes=done.received_bytes,
            lower_bound_bytes=self._lower_bound,
            staging_bytes=done.staging_bytes,
            finalize_bytes=self._sink.finalize_bytes,
        )
