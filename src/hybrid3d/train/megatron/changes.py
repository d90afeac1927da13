"""Tracks which elements of the parameters an update has changed, where Megatron-Core writes them.

Megatron's distributed optimizer keeps its part of the parameters in float32 and copies it over the model's parameters
in bfloat16, after which each data-parallel rank gathers the parts of the others. Before the copy the old values are
still there: they are compared with what replaces them, and the results, one bit an element, are gathered like the
parameters. No copy of old values is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel

from hybrid3d.reshard.delta.encoding import Changes, count_bits, num_bytes, pack_bits
from hybrid3d.reshard.move.verify import checksum

COMPARED_AT_ONCE = 1 << 22  # elements, which bounds the memory of a comparison


class ChangeTracker:
    """The changed elements of a rank's bfloat16 parameters, accumulated over updates until `clear`.

    Parameters of other dtypes are not tracked: all of their elements count as changed.

    Attributes:
        complete: False if parameters were changed by something else than the optimizer since the last `clear`.
    """

    def __init__(self, modules: Sequence[DistributedDataParallel]):
        buffers = [buffer for m in modules for buffer in (*m.buffers, *m.expert_parallel_buffers)]
        self._buckets = [
            bucket for buffer in buffers if buffer.param_dtype is torch.bfloat16 for bucket in buffer.buckets
        ]
        # Two bytes more, so that every rank's part has the same number of whole bytes: see `gather`.
        self._bits = [
            torch.zeros(num_bytes(b.param_data.numel()) + 2, dtype=torch.uint8, device=b.param_data.device)
            for b in self._buckets
        ]
        self._number = {id(bucket): number for number, bucket in enumerate(self._buckets)}
        self._sums: list[torch.Tensor] = []
        self._tensors: Mapping[str, torch.Tensor] = {}
        self.complete = False

    def name(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Call parameters by these local names in `bitmaps`."""
        self._tensors = tensors

    @property
    def elements(self) -> int:
        """The number of tracked elements."""
        return sum(bucket.param_data.numel() for bucket in self._buckets)

    def count_changed(self) -> int:
        """Return how many elements have changed."""
        return sum(int(count_bits(part)) for bits in self._bits for part in bits.split(COMPARED_AT_ONCE // 8))

    def bitmaps(self) -> Changes:
        """Return the bitmaps of those of the named tensors that are tracked."""
        places = [(b.param_data.untyped_storage()._cdata, b.param_data.storage_offset()) for b in self._buckets]
        found = {}
        for name, tensor in self._tensors.items():
            for (storage, first), bucket, bits in zip(places, self._buckets, self._bits, strict=True):
                start = tensor.storage_offset() - first
                if tensor.untyped_storage()._cdata == storage and 0 <= start < bucket.param_data.numel():
                    assert start % 8 == 0, "Megatron aligns parameters to 128 bytes"
                    found[name] = bits[start // 8 : start // 8 + num_bytes(tensor.numel())]
        return found

    def check(self) -> bool:
        """Return `complete`, after a look at whether the parameters still are what the last update made of them."""
        if self._sums and not all(
            bool(checksum(bucket.param_data) == before)
            for bucket, before in zip(self._buckets, self._sums, strict=True)
        ):
            self.complete = False
        return self.complete

    def clear(self) -> None:
        """Begin anew: the parameters as they are now have been synced."""
        for bits in self._bits:
            bits.zero_()
        if not self.complete:  # else they are those of the last update
            self._sums = [checksum(bucket.param_data) for bucket in self._buckets]
        self.complete = True

    @contextmanager
    def recording(self, optimizer: Any) -> Iterator[None]:
        """Record the elements that change when this optimizer copies its parameters over the model's."""
        copy = optimizer._copy_main_params_to_model_params

        def compare_and_copy() -> None:
            for main, model in _pairs(optimizer):
                buffer, _, number = optimizer.model_param_gbuf_map[model]
                bucket = optimizer.buffers[buffer].buckets[number]
                if id(bucket) not in self._number:
                    continue  # it is not tracked
                span = optimizer._get_model_param_range_map(model)["gbuf_world_in_bucket"]
                old = bucket.param_data.view(-1)[span.start : span.end]
                _mark(self._bits[self._number[id(bucket)]], span.start, old, main)
            copy()

        optimizer._copy_main_params_to_model_params = compare_and_copy  # shadows the method of its class
        try:
            yield
        finally:
            del optimizer._copy_main_params_to_model_params

    def gather(self, group: Any) -> None:
        """Gather the bits of a group of buckets whose parameters have just been gathered.

        Args:
            group: a bucket group of Megatron's DDP. All of its data-parallel ranks call this together.
        """
        ranks = group.intra_distributed_optimizer_instance_group
        for bucket in group.buckets:
            number = self._number.get(id(bucket))
            if number is None:
                continue
            if self._sums:
                self._sums[number] = checksum(bucket.param_data)
            if ranks.size() == 1:
                continue
            bits, part = self._bits[number], bucket.param_data.numel() // ranks.size()
            nbytes = part // 8 + 2  # a part may begin and end within a byte
            first = [rank * part // 8 for rank in range(ranks.size())]
            gathered = torch.empty(ranks.size() * nbytes, dtype=torch.uint8, device=bits.device)
            dist.all_gather_into_tensor(gathered, bits[first[ranks.rank()] :][:nbytes].clone(), group=ranks)
            for at, row in zip(first, gathered.split(nbytes), strict=True):
                bits[at : at + nbytes] |= row


def _pairs(optimizer: Any) -> Iterator[tuple[torch.Tensor, torch.nn.Parameter]]:
    """Yield this rank's part of each bfloat16 parameter in float32, and the parameter."""
    groups = zip(optimizer.shard_fp32_from_float16_groups, optimizer.model_float16_groups, strict=True)
    return (pair for mains, models in groups for pair in zip(mains, models, strict=True))


def _mark(bits: torch.Tensor, start: int, old: torch.Tensor, main: torch.Tensor) -> None:
    """Set the bits, from bit `start` on, of the elements that differ from what `main` will make of them."""
    for at in range(0, old.numel(), COMPARED_AT_ONCE):
        before = old[at : at + COMPARED_AT_ONCE]
        after = main.view(-1)[at : at + COMPARED_AT_ONCE].to(before.dtype)
        differ = before.view(torch.int16) != after.view(torch.int16)
        packed = pack_bits(torch.nn.functional.pad(differ, ((start + at) % 8, 0)))
        first = (start + at) // 8
        bits[first : first + len(packed)] |= packed
