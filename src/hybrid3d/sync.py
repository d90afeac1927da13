"""Train -> rollout: the plan that all ranks agree on, made once, and its execution, every step."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist

from hybrid3d import ranks
from hybrid3d.config import Recipe
from hybrid3d.reshard.classes import outline_of
from hybrid3d.reshard.coverage import check_arrivals, check_same_tensors, lower_bound
from hybrid3d.reshard.executor import Executor, Report, Tensors
from hybrid3d.reshard.planner import Known, Routes
from hybrid3d.reshard.transport import make_transport
from hybrid3d.rollout.engine import RolloutEngine
from hybrid3d.train.runtime import device, synchronize
from hybrid3d.train.weights import MegatronWeights, canonical_shapes

MIB = 1 << 20


@dataclass(frozen=True)
class SyncReport:
    """One sync on this rank. Bytes are measured by the transport and by what was allocated, not read off the plan.

    Attributes:
        corrupted: tensors that, on some rank, had not landed as they were sent and were moved once more.
        phases: seconds by phase of the execution.
    """

    seconds: float
    received_bytes: int
    lower_bound_bytes: int
    staging_bytes: int
    finalize_bytes: int
    corrupted: tuple[str, ...] = ()
    phases: Mapping[str, float] = field(default_factory=dict)


class CorruptSync(RuntimeError):
    """Weights do not land as they are sent: memory or a link of this machine is broken."""


class WeightSync:
    """Brings a rank's share of the rollout layout up to date with the train layout.

    Attributes:
        plan: what this rank sends, receives and copies.
        holders: what each group of ranks holds.
        source, sink: the trained weights, and vLLM's.
        lower_bound: the fewest bytes that this rank must receive.

    Raises (when made):
        PlanError: vLLM wants a tensor that Megatron does not hold, or twice the same.
        UnsupportedLoader: vLLM's loader of this model cannot be replayed on shards.
    """

    def __init__(self, recipe: Recipe, trained: MegatronWeights, engine: RolloutEngine, rank: int):
        held = trained.holdings
        self.holders = holders = ranks.gather_alike(outline_of(held))
        self._engine = engine
        self._verify = recipe.sync.verify
        self.sink = engine.weights(canonical_shapes([side for _, side in holders]))
        wanted = self.sink.demand
        readers = ranks.gather_alike(outline_of(wanted))
        check_same_tensors(holders, readers)
        routes = Routes(holders, readers, int(recipe.sync.bucket_mib * MIB), recipe.machine.gpus_per_node)
        moves = routes.moves(rank, Known({rank: held}, {rank: wanted}))
        self.plan = routes.plan(rank, moves, routes.ends([moves], ranks.least))
        check_arrivals(self.plan, wanted)
        self.lower_bound = lower_bound({rank: held}, {rank: wanted})[rank]
        self.sink.prepare(self.plan.layers)
        self.transport = make_transport(device(), dist.new_group(list(range(recipe.world_size))))
        self.source = Tensors(trained.tensors)
        self._executor = Executor(self.plan, self.source, self.sink, self.transport, device())

    def run(self, number: int) -> SyncReport:
        """Move the weights as they are now; every rank calls this together.

        Until it returns, the engine refuses to generate. Where a check finds that something has not landed as it was
        sent, everything is moved once more, and checked.

        Args:
            number: of these weights: how many updates they have behind them.

        Raises:
            CorruptSync: the second time it was no better.
        """
        start = time.perf_counter()
        self._engine.updates = None
        verify = is_verified(self._verify, number)
        done = self._move(verify)
        corrupted = _of_all_ranks(done.wrong) if verify else ()
        if corrupted:
            print(f"{len(corrupted)} tensors have not landed as sent: {_some(corrupted)}; once more", flush=True)
            done = self._move(verify=True)
            still = _of_all_ranks(done.wrong)
            if still:
                raise CorruptSync(f"{len(still)} tensors have not landed as they were sent, twice: {_some(still)}")
        self._engine.reset_cache()
        synchronize()
        self._engine.updates = number
        return SyncReport(
            seconds=time.perf_counter() - start,
            received_bytes=done.received_bytes,
            lower_bound_bytes=self.lower_bound,
            staging_bytes=done.staging_bytes,
            finalize_bytes=self.sink.finalize_bytes,
            corrupted=corrupted,
            phases=done.seconds,
        )

    def _move(self, verify: bool) -> Report:
        self.sink.begin()
        done = self._executor.run(verify)
        self.sink.end()
        return done


def is_verified(setting: str, number: int) -> bool:
    """Whether the sync of weights with so many updates is verified: `always`, `every-N` or `never`."""
    if setting.startswith("every-"):
        return number % int(setting.removeprefix("every-")) == 0
    return setting == "always"


def _of_all_ranks(names: Sequence[str] | None) -> tuple[str, ...]:
    return tuple(sorted({name for of_rank in ranks.gather(names) for name in of_rank or ()}))


def _some(names: Sequence[str]) -> str:
    return ", ".join([*names[:5], *(["..."] if len(names) > 5 else [])])
