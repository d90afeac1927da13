"""Decides which syncs send only the elements that changed, and sends them."""

from __future__ import annotations

import enum
from collections.abc import Container, Iterable, Mapping
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor

from hybrid3d.config import Recipe
from hybrid3d.distributed import all_reduce_max, gather_objects, gather_unique
from hybrid3d.reshard.delta.executor import DeltaExecutor, DeltaReport
from hybrid3d.reshard.ends import ChangeSource, Sink
from hybrid3d.reshard.move.executor import Executor, NamedTensors
from hybrid3d.reshard.move.transport import Transport
from hybrid3d.reshard.plan.planner import RankPlan
from hybrid3d.sync.choice import ExpectedSeconds, SyncEstimate
from hybrid3d.sync.plan import SyncPlan
from hybrid3d.train.megatron.runtime import device
from hybrid3d.train.megatron.source import MegatronWeights

if TYPE_CHECKING:  # a sync is between a source and a sink, so that ranks without vLLM can have one
    from hybrid3d.rollout.sink import RolloutWeights


class DenseReason(enum.IntEnum):
    """Why a sync sends all elements; where ranks have different reasons, the largest counts."""

    NONE = 0
    SLOWER = 1
    OTHER_CHANGES = 2
    UNFINISHED = 3
    FIRST = 4
    NOT_TRACKED = 5
    DISCARDED = 6
    FLOAT32 = 7
    SETTING = 8

    def __str__(self) -> str:
        return _REASONS[self]


_REASONS = (
    "",
    "a sync of changed elements is expected to take longer",
    "weights were changed by something else than the optimizer",
    "vLLM may not have the weights of the last sync: it did not finish, or this one was to send everything",
    "it is the first sync of these processes",
    "vLLM keeps no tensor as it is loaded, or Megatron's optimizer updates none in bfloat16",
    "vLLM frees its weights while it sleeps: set rollout.keep_weights=true",
    "model.dtype is not bfloat16: nearly all elements change in each update",
    "sync.delta=never",
)


class DeltaSync:
    """Sends the elements that changed since the last sync, where that is known and vLLM still has the others.

    Every rank of the group calls every method together. A tensor is sent sparsely if each of its holders tracks its
    changes, and each of its readers keeps it where and as the sync wrote it; all others are always sent in full.

    Attributes:
        reason: why the sync in progress sends all elements; `NONE` if it does not.
        expected: the seconds by which `sync.delta: auto` chose for the sync in progress; None where it had no choice.
    """

    def __init__(
        self,
        recipe: Recipe,
        group: dist.ProcessGroup,
        trained: MegatronWeights | None,
        tracker: ChangeSource | None,
        sink: RolloutWeights | None,
        discards_weights: bool,
        names: Iterable[str],
        estimate: SyncEstimate,
    ):
        """
        Args:
            estimate: of the seconds of a sync.
            trained: this rank's weights, if it trains; `tracker` tracks their changes.
            sink: vLLM's weights on this rank, if it generates.
            discards_weights: vLLM frees its weights between syncs.
            names: all canonical tensors.
        """
        self._settings, self._group = recipe.sync, group
        self._dtype = recipe.model.dtype
        self._trained, self._tracker, self._sink = trained, tracker, sink
        self._discards_weights = discards_weights
        self._names = frozenset(names)
        self._sparse: frozenset[str] | None = None  # not known before the first sync
        self._executor: DeltaExecutor | None = None
        self._elements = 0
        self._finished = False
        self._estimate = estimate
        self.reason = DenseReason.FIRST
        self.expected: ExpectedSeconds | None = None

    @property
    def sparse(self) -> frozenset[str]:
        """The canonical tensors that are sent sparsely; none before the first sync."""
        return self._sparse or frozenset()

    @property
    def probes(self) -> bool:
        """Whether the sync in progress must record checksums, for `find_sparse`."""
        return self.reason == DenseReason.FIRST

    @property
    def extra_bytes(self) -> int:
        """Memory of the bitmaps of this rank."""
        return 0 if self._tracker is None else self._tracker.nbytes

    def require_dense(self) -> None:
        """Send all elements in the next sync."""
        self._finished = False

    def begin(self, plan: SyncPlan) -> bool:
        """Begin a sync: return whether it sends only changed elements. The ranks agree on it."""
        here = self._reason_here()
        if here not in (DenseReason.FLOAT32, DenseReason.SETTING):  # which all ranks read in the recipe
            here = DenseReason(all_reduce_max([here], self._group)[0])
        self.reason, self.expected = here, None
        if not here and self._settings.delta == "auto":
            self.expected = self._estimate.expect(plan.current, plan.ready, self.sparse, self._trained)
            self.reason = DenseReason.NONE if self.expected.prefers_delta else DenseReason.SLOWER
        self._finished = False
        if self.reason:
            self._executor = None  # its staging memory is needed by another
        return not self.reason

    def _reason_here(self) -> DenseReason:
        """Return why this rank needs all elements to be sent."""
        if self._settings.delta == "never":
            return DenseReason.SETTING
        if self._dtype != "bfloat16":
            return DenseReason.FLOAT32
        if self._discards_weights:
            return DenseReason.DISCARDED
        if self._sparse is None:
            return DenseReason.FIRST
        if not self._sparse:
            return DenseReason.NOT_TRACKED
        if not self._finished:
            return DenseReason.UNFINISHED
        if self._tracker is not None and not self._tracker.check():
            return DenseReason.OTHER_CHANGES
        return DenseReason.NONE

    def run(self, plan: RankPlan, source: NamedTensors, sink: Sink, transport: Transport, verify: bool) -> DeltaReport:
        """Send the elements that changed."""
        assert self._sparse, "a sync without tensors to send sparsely is dense"
        if self._executor is None:
            self._executor = DeltaExecutor(plan, self._sparse, source, sink, transport, device())
        changes: Mapping[str, Tensor] = {}
        if self._tracker is not None and self._trained is not None:
            changes = self._tracker.changes(self._trained.tensors)
        return self._executor.run_delta(changes, verify)

    def count(self) -> tuple[int | None, int]:
        """Return how many of this rank's tracked weights changed since the last sync, and how many all ranks track.

        The first is None where that is not known.
        """
        if self._tracker is None or not self._tracker.complete:
            return None, self._elements
        changed = self._tracker.count_changed()
        self._estimate.observe(changed, self._tracker.elements)
        return changed, self._elements

    def find_sparse(self, executor: Executor) -> None:
        """Find the tensors that can be sent sparsely, after a sync that has recorded checksums."""
        self._elements = sum(gather_objects(0 if self._tracker is None else self._tracker.elements, self._group))
        kept = set() if self._sink is None else self._sink.kept_tensors()
        changed = executor.changed_since_landed(kept)
        dense = self._untracked() | self._not_kept(changed)
        self._sparse = self._names - {name for _, names in gather_unique(dense, self._group) for name in names}

    def end(self, intact: bool) -> None:
        """End a sync, after which vLLM has all weights as they are now.

        Args:
            intact: False if weights arrived corrupted at first.
        """
        if self._tracker is not None:
            self._tracker.clear()
        self._finished = intact

    def _untracked(self) -> frozenset[str]:
        """Return the canonical tensors of which this rank holds elements whose changes it does not know."""
        if self._trained is None:
            return frozenset()
        tracked: Container[str] = () if self._tracker is None else self._tracker.changes(self._trained.tensors)
        return frozenset(piece.name for piece in self._trained.pieces if piece.view.tensor not in tracked)

    def _not_kept(self, changed: set[str]) -> frozenset[str]:
        """Return the canonical tensors that vLLM does not keep on this rank where and as the sync wrote them."""
        if self._sink is None:
            return frozenset()
        kept = self._sink.kept_tensors()
        moved = {piece.name for piece in self._sink.demand.pieces if piece.view.tensor not in kept}
        return frozenset(moved | changed)
