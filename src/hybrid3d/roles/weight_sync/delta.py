"""Decides which syncs send only the elements that changed, and sends them."""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable

import torch.distributed as dist

from hybrid3d.config import Sync
from hybrid3d.distributed import all_reduce_max, gather_unique
from hybrid3d.reshard.delta import DeltaExecutor, DeltaReport
from hybrid3d.reshard.executor import Executor, NamedTensors
from hybrid3d.reshard.planner import RankPlan
from hybrid3d.reshard.protocols import Sink
from hybrid3d.reshard.transport import Transport
from hybrid3d.rollout.weights import RolloutWeights
from hybrid3d.train.changes import ChangeTracker
from hybrid3d.train.runtime import device
from hybrid3d.train.weights import MegatronWeights

logger = logging.getLogger(__name__)

# Why a sync sends all elements; where ranks have different reasons, the last of these counts.
DENSE_REASONS = (
    "",
    "sync.anchor_every",
    "weights changed outside of the optimizer",
    "the last sync did not finish, or was corrupted",
    "first sync of this process",
    "no weights are tracked: only bfloat16 weights that vLLM keeps as they are loaded can be",
    "sync.delta=never",
)


class DeltaSync:
    """Sends the elements that changed since the last sync, where that is known and vLLM still has the others.

    Every rank of the group calls every method together. A tensor is sent sparsely if each of its holders tracks its
    changes, and each of its readers keeps it where and as the sync wrote it; all others are always sent in full.

    Attributes:
        dense_reason: why the sync in progress sends all elements; empty if it does not.
    """

    def __init__(
        self,
        settings: Sync,
        group: dist.ProcessGroup,
        trained: MegatronWeights | None,
        tracker: ChangeTracker | None,
        sink: RolloutWeights | None,
        names: Iterable[str],
    ):
        """
        Args:
            trained: this rank's weights, if it trains; `tracker` tracks their changes.
            sink: vLLM's weights on this rank, if it generates.
            names: all canonical tensors.
        """
        self._settings, self._group = settings, group
        self._trained, self._tracker, self._sink = trained, tracker, sink
        self._names = frozenset(names)
        self._sparse: frozenset[str] | None = None  # not known before the first sync
        self._executor: DeltaExecutor | None = None
        self._syncs_since_dense = 0
        self._finished = False
        self.dense_reason = ""

    @property
    def probes(self) -> bool:
        """Whether the sync in progress must record checksums, for `find_sparse`."""
        return self.wanted and self._sparse is None

    @property
    def wanted(self) -> bool:
        return self._settings.delta == "auto"

    @property
    def extra_bytes(self) -> int:
        """Memory of the bitmaps of this rank."""
        return 0 if self._tracker is None else self._tracker.nbytes

    def begin(self) -> bool:
        """Begin a sync: return whether it sends only changed elements, which all ranks agree on."""
        reason = DENSE_REASONS.index(self._reason())
        self.dense_reason = DENSE_REASONS[all_reduce_max([reason], self._group)[0]]
        self._finished = False
        if self.dense_reason:
            self._executor = None  # its staging memory is needed by another
        return not self.dense_reason

    def _reason(self) -> str:
        """Return why this rank wants all elements to be sent."""
        if not self.wanted:
            return DENSE_REASONS[6]
        if self._sparse is None:
            return DENSE_REASONS[4]
        if not self._sparse:
            return DENSE_REASONS[5]
        if not self._finished:
            return DENSE_REASONS[3]
        if self._tracker is not None and not self._tracker.check():
            return DENSE_REASONS[2]
        every = self._settings.anchor_every
        return DENSE_REASONS[1] if every is not None and self._syncs_since_dense + 1 >= every else ""

    def run(self, plan: RankPlan, source: NamedTensors, sink: Sink, transport: Transport, verify: bool) -> DeltaReport:
        """Send the elements that changed."""
        assert self._sparse, "a sync without tensors to send sparsely is dense"
        if self._executor is None:
            self._executor = DeltaExecutor(plan, self._sparse, source, sink, transport, device())
        changes = {}
        if self._tracker is not None and self._trained is not None:
            changes = self._tracker.changes(self._trained.tensors)
        self._syncs_since_dense += 1
        return self._executor.run_delta(changes, verify)

    def count(self) -> tuple[int, int]:
        """Return how many elements of this rank's tracked weights changed since the last sync, and of how many."""
        return (0, 0) if self._tracker is None else self._tracker.count()

    def find_sparse(self, executor: Executor) -> None:
        """Find the tensors that can be sent sparsely, after the first sync, which was verified."""
        if not self.wanted or self._sparse is not None:
            return
        dense = self._untracked() | self._not_kept(executor)
        self._sparse = self._names - {name for _, names in gather_unique(dense, self._group) for name in names}
        if not self._sparse and self._group.rank() == 0:
            logger.info("every sync sends all weights: %s", DENSE_REASONS[5])

    def end(self, intact: bool) -> None:
        """End a sync, which has brought all weights as they are now.

        Args:
            intact: False if weights arrived corrupted at first.
        """
        if self.dense_reason:
            self._syncs_since_dense = 0
        if self._tracker is not None:
            self._tracker.clear()
        self._finished = intact

    def _untracked(self) -> frozenset[str]:
        """Return the canonical tensors of which this rank holds elements whose changes it does not know."""
        if self._trained is None:
            return frozenset()
        tracked: Container[str] = () if self._tracker is None else self._tracker.changes(self._trained.tensors)
        return frozenset(piece.name for piece in self._trained.pieces if piece.view.tensor not in tracked)

    def _not_kept(self, executor: Executor) -> frozenset[str]:
        """Return the canonical tensors that vLLM does not keep on this rank where and as the sync wrote them."""
        if self._sink is None:
            return frozenset()
        in_place = self._sink.in_place_tensors()
        moved = {piece.name for piece in self._sink.demand.pieces if piece.view.tensor not in in_place}
        return frozenset(moved | executor.changed_since_landed())
