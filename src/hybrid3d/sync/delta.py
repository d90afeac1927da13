"""Decides which syncs send only the elements that changed, and sends them."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from hybrid3d.config import Recipe
from hybrid3d.config.recipe import FREED_WEIGHTS
from hybrid3d.reshard.delta.executor import DeltaExecutor, DeltaReport
from hybrid3d.reshard.ends import Exchange, WeightSink, WeightSource
from hybrid3d.reshard.move.device import device
from hybrid3d.reshard.move.executor import Executor
from hybrid3d.reshard.move.transport import Transport
from hybrid3d.reshard.sync_plan import SyncPlan
from hybrid3d.sync.choice import ExpectedSeconds, SyncEstimate


@dataclass(frozen=True)
class SyncSettings:
    """What a sync reads of a recipe, equal on every rank.

    Attributes:
        bucket_bytes: the size of a staging buffer.
        ranks_per_node: the number of consecutive ranks that share a node.
        always_dense: why no sync may send changed elements alone; empty if some may.
    """

    bucket_bytes: int
    ranks_per_node: int
    always_dense: str = ""

    @classmethod
    def of(cls, recipe: Recipe) -> SyncSettings:
        return cls(recipe.sync.bucket_bytes, recipe.machine.gpus_per_node, recipe.always_dense)


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
        """
        Args:
            names: all canonical tensors.
            estimate: of the seconds of a sync; without one changed elements are sent alone wherever that is possible.
        """
        self._source, self._sink, self._settings, self._exchange = source, sink, settings, exchange
        self._names = frozenset(names)
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
        kept = self._sink.kept_tensors()
        dense = self._untracked() | self._not_kept(kept) | executor.changed_since_landed(kept)
        self.sparse = self._names - {name for _, names in self._exchange.unique(dense) for name in names}
        self._knows_sparse = True

    def end(self, intact: bool) -> None:
        """End a sync, after which the sinks have all weights as they are now.

        Args:
            intact: False if weights arrived corrupted at first.
        """
        self._source.changes.clear()
        self._finished = intact

    def _untracked(self) -> frozenset[str]:
        """Return the canonical tensors of which this rank holds elements whose changes it does not know."""
        tracked = self._source.changes.bitmaps()
        return frozenset(piece.name for piece in self._source.holdings.pieces if piece.view.tensor not in tracked)

    def _not_kept(self, kept: Iterable[str]) -> frozenset[str]:
        """Return the canonical tensors that the sink does not keep where a sync writes them."""
        stays = frozenset(kept)
        return frozenset(piece.name for piece in self._sink.demand.pieces if piece.view.tensor not in stays)
