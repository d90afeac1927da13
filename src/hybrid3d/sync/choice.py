"""The choice of `sync.delta: auto` in a run, which all ranks make alike before each sync."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from hybrid3d.config import Recipe
from hybrid3d.planning.hardware import CPU, hardware_of
from hybrid3d.planning.sync_choice import (
    ASSUMED_FRACTION,
    SyncLoad,
    delta_seconds,
    dense_seconds,
    hidden_seconds,
)
from hybrid3d.reshard.delta.encoding_work import EncodingWork, count_encoding
from hybrid3d.reshard.ends import Exchange
from hybrid3d.reshard.fp8 import FP8
from hybrid3d.reshard.move.device import device
from hybrid3d.reshard.move.transport import Transport
from hybrid3d.reshard.plan.layout import ITEMSIZE, Holdings
from hybrid3d.reshard.plan.planner import RankPlan

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

    @property
    def metrics(self) -> dict[str, float]:
        """As the metrics of a step have them."""
        return {f"sync/{key}": value for key, value in self.fields.items() if key.endswith("seconds")}


class SyncEstimate:
    """Estimates both kinds of sync from this rank's plan. Every rank calls `expect` together."""

    def __init__(self, recipe: Recipe, exchange: Exchange, transport: Transport, overlaps: bool):
        """
        Args:
            overlaps: syncs of all elements overlap the last update of a step.
        """
        self._exchange, self._transport, self._overlaps = exchange, transport, overlaps
        self._per_node, self._train = recipe.machine.gpus_per_node, recipe.train
        self._hardware = CPU if device().type == "cpu" else hardware_of(recipe.machine)
        self._itemsize = ITEMSIZE[FP8 if recipe.quantizes else recipe.model.dtype]
        self._plan: RankPlan | None = None
        self._load, self._work, self._dense = SyncLoad(), EncodingWork(), 0.0
        self._fraction = 0.0

    def observe(self, changed: int, elements: int) -> None:
        """Note how many of the elements that this rank tracks changed in the sync that ends."""
        if elements:
            self._fraction = changed / elements

    def expect(self, plan: RankPlan, ready: Sequence[int], sparse: frozenset[str], held: Holdings) -> ExpectedSeconds:
        """Return the expected seconds of the slowest rank.

        Args:
            ready: by bucket of the plan, the optimizer bucket after which it may start.
            sparse: the canonical tensors of which only changed elements may be sent.
            held: what this rank sends.
        """
        if plan is not self._plan:
            self._count(plan, ready, sparse, held)
        found = self._exchange.maximum([round(self._fraction / _UNIT)])[0] * _UNIT
        fraction = min(found, 1.0) or ASSUMED_FRACTION
        delta = delta_seconds(self._load, self._work, fraction, self._itemsize, self._hardware, self._borrows)
        slowest = self._exchange.maximum([round(self._dense / _UNIT), round(delta / _UNIT)])
        return ExpectedSeconds(slowest[0] * _UNIT, slowest[1] * _UNIT, fraction)

    @property
    def _borrows(self) -> bool:
        shared = self._transport.shared_memory
        return bool(shared and shared.peers)

    def _count(self, plan: RankPlan, ready: Sequence[int], sparse: frozenset[str], held: Holdings) -> None:
        self._plan = plan
        self._load = SyncLoad.of(plan.rank, plan.transfers, self._per_node)
        self._work = count_encoding(plan, sparse)
        dense = dense_seconds(self._load, self._hardware, self._borrows)
        parameters = 0.0
        if self._overlaps:
            ranks = self._train.dp * self._train.cp  # among which the optimizer's state is divided
            parameters = sum(piece.box.numel for piece in held.pieces) / ranks
        early = self._early_part(plan, ready) if parameters else 0.0
        self._dense = dense - hidden_seconds(dense, early, parameters, self._hardware)

    def _early_part(self, plan: RankPlan, ready: Sequence[int]) -> float:
        """Return the part of this rank's bytes that may start before the optimizer's last bucket is updated."""
        early = bisect_left(ready, ready[-1]) if ready else 0
        if self._transport.blocks_host:
            early = min(early, MOST_BLOCKED_BUCKETS)
        started = chain.from_iterable(bucket.transfers for bucket in plan.buckets[:early])
        return SyncLoad.of(plan.rank, started, self._per_node).nbytes / self._load.nbytes if self._load.nbytes else 0.0
