"""The choice of `sync.delta: auto` in a run, which all ranks make alike before each sync."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch.distributed as dist

from hybrid3d.config import Recipe
from hybrid3d.distributed import all_reduce_max
from hybrid3d.planning.hardware import CPU, hardware_of
from hybrid3d.planning.sync_choice import (
    ASSUMED_FRACTION,
    SyncLoad,
    delta_seconds,
    dense_seconds,
    hidden_seconds,
)
from hybrid3d.reshard.delta.encoding_work import EncodingWork, count_encoding
from hybrid3d.reshard.fp8 import FP8
from hybrid3d.reshard.move.transport import Transport
from hybrid3d.reshard.plan.layout import ITEMSIZE
from hybrid3d.reshard.plan.planner import RankPlan
from hybrid3d.train.megatron.runtime import device
from hybrid3d.train.megatron.source import MegatronWeights

MOST_BLOCKED_BUCKETS = 2  # that start early where a wait blocks the host: see `Executor.start_ready_buckets`
_UNIT = 1e-9  # of seconds and of fractions, which ranks exchange as integers


@dataclass(frozen=True)
class ExpectedSeconds:
    """The seconds that a sync is expected to take on the slowest rank, beside the optimizer's step.

    Attributes:
        dense, delta: if all elements are sent, and if only those are that changed.
        fraction: of the elements that changed, on which `delta` depends: that of the last sync.
    """

    dense: float
    delta: float
    fraction: float

    @property
    def prefers_delta(self) -> bool:
        return self.delta < self.dense

    @property
    def fields(self) -> dict[str, float]:
        """As an event has them."""
        return {
            "expected_dense_seconds": self.dense,
            "expected_delta_seconds": self.delta,
            "assumed_changed_fraction": self.fraction,
        }


class SyncEstimate:
    """Estimates both kinds of sync from this rank's plan. Every rank of the group calls `expect` together."""

    def __init__(self, recipe: Recipe, group: dist.ProcessGroup, transport: Transport, overlaps: bool):
        """
        Args:
            overlaps: syncs of all elements overlap the last update of a step.
        """
        self._group, self._transport, self._overlaps = group, transport, overlaps
        self._per_node, self._train = recipe.machine.gpus_per_node, recipe.train
        self._hardware = CPU if device().type == "cpu" else hardware_of(recipe.machine)
        self._itemsize = ITEMSIZE[FP8 if recipe.quantizes else recipe.model.dtype]
        self._plan: RankPlan | None = None
        self._load, self._work, self._dense = SyncLoad(), EncodingWork(), 0.0
        self._fraction = 0.0

    def observe(self, changed: int | None, elements: int) -> None:
        """Note how many of the elements that this rank tracks changed in the sync that ends; None: it is not known."""
        if changed is not None and elements:
            self._fraction = changed / elements

    def expect(
        self, plan: RankPlan, ready: Sequence[int], sparse: frozenset[str], trained: MegatronWeights | None
    ) -> ExpectedSeconds:
        """Return the expected seconds of the slowest rank.

        Args:
            ready: by bucket of the plan, the optimizer bucket after which it may start.
            sparse: the canonical tensors of which only changed elements may be sent.
            trained: this rank's weights, if it trains.
        """
        if plan is not self._plan:
            self._count(plan, ready, sparse, trained)
        found = all_reduce_max([round(self._fraction / _UNIT)], self._group)[0] * _UNIT
        fraction = min(found, 1.0) or ASSUMED_FRACTION
        delta = delta_seconds(self._load, self._work, fraction, self._itemsize, self._hardware, self._borrows)
        slowest = all_reduce_max([round(self._dense / _UNIT), round(delta / _UNIT)], self._group)
        return ExpectedSeconds(slowest[0] * _UNIT, slowest[1] * _UNIT, fraction)

    @property
    def _borrows(self) -> bool:
        shared = self._transport.shared_memory
        return shared is not None and bool(shared.peers)

    def _count(
        self, plan: RankPlan, ready: Sequence[int], sparse: frozenset[str], trained: MegatronWeights | None
    ) -> None:
        self._plan = plan
        self._load = SyncLoad.of(plan.rank, plan.transfers, self._per_node)
        self._work = count_encoding(plan, sparse)
        dense = dense_seconds(self._load, self._hardware, self._borrows)
        parameters = 0.0
        if trained is not None and self._overlaps:
            ranks = self._train.dp * self._train.cp  # among which the optimizer's state is divided
            parameters = sum(tensor.numel() for tensor in trained.tensors.values()) / ranks
        early = self._early_part(plan, ready) if parameters else 0.0
        self._dense = dense - hidden_seconds(dense, early, parameters, self._hardware)

    def _early_part(self, plan: RankPlan, ready: Sequence[int]) -> float:
        """Return the part of this rank's bytes that may start before the optimizer's last bucket is updated."""
        early = bisect_left(ready, ready[-1]) if ready else 0
        if self._transport.blocks_host:
            early = min(early, MOST_BLOCKED_BUCKETS)
        started = chain.from_iterable(bucket.transfers for bucket in plan.buckets[:early])
        return SyncLoad.of(plan.rank, started, self._per_node).nbytes / self._load.nbytes if self._load.nbytes else 0.0
