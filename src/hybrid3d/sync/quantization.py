"""Quantizes the weights that a sync sends, on the ranks that hold them, once for each sync."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from hybrid3d.reshard.ends import ChangeSource
from hybrid3d.reshard.fp8 import SplitBlocks, kind_of, quantized_kinds, split_blocks
from hybrid3d.reshard.plan.classes import Group
from hybrid3d.reshard.quantized_weights import QuantizedChanges, QuantizedWeights
from hybrid3d.train.megatron.runtime import device
from hybrid3d.train.megatron.source import MegatronWeights, quantized_weights


class SyncQuantization:
    """What takes the place of a rank's weights in a sync. Every rank of the group calls every method together.

    Attributes:
        trained: the weights that the rank sends; None on a rank that does not train.
        optimizer_buckets: the optimizer bucket of each of their local tensors.
        changes: which of their elements have changed.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        trained: MegatronWeights | None,
        optimizer_buckets: Mapping[str, int],
        changes: ChangeSource | None,
        keep: bool,
    ):
        """
        Args:
            trained: the rank's own weights, if it trains.
            optimizer_buckets: the optimizer bucket of each of its local tensors.
            changes: which of its own weights have changed.
            keep: the quantized weights from sync to sync, so that it is known which of them changed.
        """
        self._group = group
        self._made: QuantizedWeights | None = None
        self._split: Mapping[str, SplitBlocks] = {}
        self.trained, self.optimizer_buckets, self.changes = trained, optimizer_buckets, changes
        self._own_buckets = optimizer_buckets
        if trained is None:
            return
        keep = keep and changes is not None
        self._made = made = quantized_weights(trained, device(), keep)
        self.trained = replace(trained, pieces=made.pieces, tensors=made.tensors)
        self.optimizer_buckets = made.buckets(optimizer_buckets)
        if changes is not None:
            self.changes = QuantizedChanges(made, changes)

    def share(self, holders: Sequence[Group], rounded_scales: Collection[str]) -> None:
        """Find the blocks that several ranks have parts of, and the scales that have to be powers of two.

        Args:
            holders: what all ranks hold.
            rounded_scales: the tensors of which the engine of this rank takes such scales only. What one engine needs,
                all get: any kernel computes with such scales.
        """
        signatures = [signature for _, signature in holders]
        self._split, kinds = split_blocks(signatures), quantized_kinds(signatures)
        here = {kind_of(name) for name in rounded_scales}
        needed = torch.tensor([kind in here for kind in kinds], dtype=torch.int32)
        dist.all_reduce(needed, dist.ReduceOp.MAX, group=self._group)
        if self._made is not None:
            self._made.share(self._split, {kind for kind, need in zip(kinds, needed.tolist(), strict=True) if need})

    def begin(self) -> None:
        """Begin a sync."""
        if self._made is not None:
            self._made.allocate()

    def bucket_ready(self, bucket: int) -> bool:
        """Quantize the weights that optimizer buckets up to this one update; return False where that has to wait.

        Blocks of which several ranks have parts wait for the last update of all ranks.
        """
        if self._split:
            return False
        if self._made is not None:
            self._made.quantize(self._own_buckets, bucket)
        return True

    def finish(self) -> None:
        """Quantize the weights that have not been yet."""
        if self._split:
            every = torch.zeros(sum(split.count for split in self._split.values()))
            if self._made is not None:
                self._made.find_largest(every)
            dist.all_reduce(every, dist.ReduceOp.MAX, group=self._group)
            if self._made is not None:
                self._made.take_largest(every)
        if self._made is not None:
            self._made.quantize()

    def end(self) -> None:
        """End a sync."""
        if self._made is not None:
            self._made.release()
