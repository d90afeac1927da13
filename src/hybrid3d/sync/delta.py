"""Decides which syncs send only the elements that changed, and sends them.

With `sync.delta: auto` all ranks choose alike before each sync, by the seconds that both kinds are expected to take.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from hybrid3d.config import Recipe
from hybrid3d.config.recipe import FREED_WEIGHTS
from hybrid3d.planning.hardware import CPU, hardware_of
from hybrid3d.planning.sync_choice import ASSUMED_FRACTION, SyncLoad, delta_seconds, dense_seconds, hidden_seconds
from hybrid3d.reshard.delta.encoding_work import EncodingWork, count_encoding
from hybrid3d.reshard.delta.executor import DeltaExecutor, DeltaReport
from hybrid3d.reshard.ends import Exchange, WeightSink, WeightSource
from hybrid3d.reshard.fp8 import FP8
from hybrid3d.reshard.move.device import device
from hybrid3d.reshard.move.executor import Executor
from hybrid3d.reshard.move.transport import Transport
from hybrid3d.reshard.plan.layout import ITEMSIZE, Holdings
from hybrid3d.reshard.plan.planner import RankPlan
from hybrid3d.reshard.sync_plan import SyncPlan

MOST_BLOCKED_BUCKETS = 2  # that start early where a wait blocks the host: see `Executor.start_ready_buckets`
_UNIT = 1e-9  # of seconds and of fractions, which ranks exchange as integers


@dataclass(frozen=True)
class SyncSettings:
    """What a sync reads of a recipe, equal on every rank; `always_dense` says why none may send changes alone."""

    bucket_bytes: int
    ranks_per_node: int
    always_dense: str = ""

    @classmethod
    def of(cls, recipe: Recipe) -> SyncSettings:
        return cls(recipe.sync.bucket_bytes, recipe.machine.gpus_per_node, recipe.always_dense)


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
    """Estimates both kinds of sync from this rank's plan; every rank calls `expect` together."""

    def __init__(self, recipe: Recipe, exchange: Exchange, transport: Transport, overlaps: bool):
        # `overlaps`: syncs of all elements overlap the last update of a step
        self._exchange, self._overlaps, self._blocks_host = exchange, overlaps, transport.blocks_host
        self._borrows = bool(transport.shared_memory and transport.shared_memory.peers)
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

        For `ready` see `SyncPlan`, for `sparse` `DeltaSync`; `held` is what this rank sends.
        """
        if plan is not self._plan:
            self._count(plan, ready, sparse, held)
        found = self._exchange.maximum([round(self._fraction / _UNIT)])[0] * _UNIT
        fraction = min(found, 1.0) or ASSUMED_FRACTION
        delta = delta_seconds(self._load, self._work, fraction, self._itemsize, self._hardware, self._borrows)
        slowest = self._exchange.maximum([round(self._dense / _UNIT), round(delta / _UNIT)])
        return ExpectedSeconds(slowest[0] * _UNIT, slowest[1] * _UNIT, fraction)

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
        if self._blocks_host:
            early = min(early, MOST_BLOCKED_BUCKETS)
        started = chain.from_iterable(bucket.transfers for bucket in plan.buckets[:early])
        return SyncLoad.of(plan.rank, started, self._per_node).nbytes / self._load.nbytes if self._load.nbytes else 0.0


class DenseReason(enum.StrEnum):
    """Why a sync sends all elements; where ranks have different reasons, the last counts."""

    NONE = ""
    SLOWER = "a sync of changed elements is expected to take longer"
    OTHER_CHANGES = "weights were changed by something else than the optimizer"
    UNFINISHED = "vLLM may not have the weights of the last sync: it did not finish, or this one was to send everything"
    FIRST = "it is the first sync of these processes"
    NOT_TRACKED = "vLLM keeps no tensor as it is loaded, or Megatron's optimizer updates none in bfloat16"
    DISCARDED = FREED_WEIGHTS
    SETTING = "a setting"  # `SyncSettings.always_dense` says which


class DeltaSync:
    """Sends the elements that changed since the last sync, where that is known and the sinks still have the others.

    Every rank calls every method together. A tensor is sent sparsely if each of its holders tracks its changes, and
    each of its readers keeps it where and as the sync wrote it; all others are always sent in full.

    Attributes:
        sparse: the canonical tensors that are sent sparsely; none before the first sync.
        reason: why the sync in progress sends all elements; `NONE` if it does not.
        expected: the seconds by which `sync.delta: auto` chose for the sync in progress; None where it had no choice.
    """

    def __init__(
        self,
        source: WeightSource,
        sink: WeightSink,
        settings: SyncSettings,
        exchange: Exchange,
        names: Iterable[str],
        estimate: SyncEstimate | None,
    ):
        """With an estimate changed elements are sent alone where that is faster, else wherever that is possible."""
        self._source, self._sink, self._settings, self._exchange = source, sink, settings, exchange
        self._names = frozenset(names)  # of all canonical tensors
        self.sparse: frozenset[str] = frozenset()
        self._knows_sparse = False
        self._executor: DeltaExecutor | None = None
        self._elements = 0
        self._finished = False
        self._estimate = estimate
        self.reason = DenseReason.FIRST
        self.expected: ExpectedSeconds | None = None

    @property
    def probes(self) -> bool:
        """Whether the sync in progress must record checksums, for `find_sparse`."""
        return self.reason == DenseReason.FIRST

    @property
    def dense_reason(self) -> str:
        """Why the sync in progress sends all elements, in words; empty if it does not."""
        return self._settings.always_dense if self.reason == DenseReason.SETTING else str(self.reason)

    def require_dense(self) -> None:
        """Send all elements in the next sync."""
        self._finished = False

    def begin(self, plan: SyncPlan) -> bool:
        """Begin a sync: return whether it sends only changed elements. The ranks agree on it."""
        here = self._reason_here()
        if here != DenseReason.SETTING:  # which all ranks read in the recipe
            reasons = [*DenseReason]
            here = reasons[self._exchange.maximum([reasons.index(here)])[0]]
        self.reason, self.expected = here, None
        if self._estimate and not here:
            self.expected = self._estimate.expect(plan.current, plan.ready, self.sparse, self._source.holdings)
            self.reason = DenseReason.NONE if self.expected.prefers_delta else DenseReason.SLOWER
        self._finished = False
        if self.reason:
            self._executor = None  # its staging memory is needed by another
        return not self.reason

    def _reason_here(self) -> DenseReason:
        """Return why this rank needs all elements to be sent."""
        if self._settings.always_dense:
            return DenseReason.SETTING
        if not self._sink.keeps_weights:
            return DenseReason.DISCARDED
        if not self._knows_sparse:
            return DenseReason.FIRST
        if not self.sparse:
            return DenseReason.NOT_TRACKED
        if not self._finished:
            return DenseReason.UNFINISHED
        return DenseReason.NONE if self._source.changes.check() else DenseReason.OTHER_CHANGES

    def run(self, plan: SyncPlan, transport: Transport, verify: bool) -> DeltaReport:
        """Send the elements that changed."""
        if self._executor is None:
            self._executor = DeltaExecutor(plan.current, self.sparse, self._source, self._sink, transport, device())
        return self._executor.run_delta(self._source.changes.bitmaps(), verify)

    def count(self) -> tuple[int | None, int]:
        """Return how many of this rank's tracked weights changed since the last sync, and how many all ranks track.

        The first is None where it is not known.
        """
        changes = self._source.changes
        if not changes.complete:
            return None, self._elements
        changed = changes.count_changed()
        if self._estimate:
            self._estimate.observe(changed, changes.elements)
        return changed, self._elements

    def find_sparse(self, executor: Executor) -> None:
        """Find the tensors that can be sent sparsely, after a sync that has recorded checksums."""
        every = self._exchange.unique(self._source.changes.elements)
        self._elements = sum(len(ranks) * elements for ranks, elements in every)
        tracked, kept = self._source.changes.bitmaps(), frozenset(self._sink.kept_tensors())
        untracked = {piece.name for piece in self._source.holdings.pieces if piece.view.tensor not in tracked}
        not_kept = {piece.name for piece in self._sink.demand.pieces if piece.view.tensor not in kept}
        dense = untracked | not_kept | executor.changed_since_landed(kept)
        self.sparse = self._names - {name for _, names in self._exchange.unique(dense) for name in names}
        self._knows_sparse = True

    def end(self, intact: bool) -> None:
        """End a sync, after which the sinks have all weights as they are now; `intact` if none arrived corrupted."""
        self._source.changes.clear()
        self._finished = intact
