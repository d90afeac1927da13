"""Steps the optimizer bucket by bucket, so that updated weights can be sent while later buckets are still stepping.

The buckets are those of Megatron's DDP, by which its distributed optimizer shards its state and gathers updated
parameters. The result is bit for bit equal to that of a step over all parameters at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer import ChainedOptimizer, MixedPrecisionOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection

from hybrid3d.reshard.delta.encoding import Changes, count_bits, num_bytes, pack_bits
from hybrid3d.reshard.move.verify import checksum
from hybrid3d.train.megatron.versions import set_in_megatron
from hybrid3d.train.trained_model import BucketHook

COMPARED_AT_ONCE = 1 << 22  # elements, which bounds the memory of a comparison
BUCKETS = 8  # approximate number: each bucket has at least 1/8 of a rank's parameters


def in_buckets(modules: Sequence[torch.nn.Module], **settings: Any) -> list[DistributedDataParallel]:
    """Wrap modules in Megatron's DDP with these settings; every stage has buckets, and not the first one alone."""
    parameters = sum(p.numel() for module in modules for p in module.parameters() if p.requires_grad)
    config = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=-(-parameters // BUCKETS), **settings)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    set_in_megatron(groups, pp=SimpleNamespace(rank=lambda: 0))  # of this group only the rank is used: the first stage
    wrapped = [DistributedDataParallel(module.config, config, module, pg_collection=groups) for module in modules]
    set_in_megatron(config, overlap_grad_reduce=False)
    return wrapped


class BucketedOptimizer:
    """Steps the optimizers of a rank's modules (one per virtual stage) bucket by bucket, first layers first.

    Attributes:
        changes: the elements of the parameters that have changed.
        bucket_of: the bucket of each parameter, by `place_of`. Parameters without a bucket are not updated.
    """

    def __init__(
        self,
        optimizer: ChainedOptimizer,
        modules: Sequence[DistributedDataParallel],
        tensors: Mapping[str, torch.Tensor],
        tracks: bool,
        separately_clipped: Collection[torch.nn.Parameter] | None,
    ):
        """
        Args:
            tensors: this rank's weights by local name.
            tracks: track which elements of bfloat16 parameters change, which takes one bit of memory for each.
            separately_clipped: this rank's parameters that are clipped by the norm of their own gradient, over all
                ranks, and do not count in that of the others; None if no rank has such parameters.
        """
        self._optimizer = optimizer
        self.changes = ChangeTracker(modules if tracks else (), tensors)
        self._stepped = [one for one in optimizer.chained_optimizers if not one.is_stub_optimizer]
        owner = {id(b): one for one in self._stepped for buffer in one.buffers for b in buffer.buckets}
        self._clipping = None
        if separately_clipped is not None:
            self._clipping = SeparateClipping(optimizer, self._stepped, separately_clipped)
        self._buckets: list[tuple[Any, Any, set[torch.nn.Parameter]]] = []
        for module in modules:
            for group in _first_layers_first(module.bucket_groups, module.expert_parallel_bucket_groups):
                params = {param for bucket in group.buckets for param in bucket.params}
                self._buckets.append((owner[id(group.buckets[0])], group, params))
        self.bucket_of: Mapping[tuple[int, int], int] = {
            place_of(param): number for number, (_, _, params) in enumerate(self._buckets) for param in params
        }

    def __len__(self) -> int:
        return len(self._buckets)

    def step(self, hook: BucketHook, accepts_grad_norm: Callable[[float], bool]) -> tuple[bool, float]:
        """Step and call the hook bucket by bucket if the norm is accepted; return whether it did, and the norm."""
        norms: list[float] = []

        def get_grad_norm() -> float:
            norms.append(_grad_norm(self._optimizer) if self._clipping is None else self._clipping.begin())
            return norms[0]

        def step_with_ready_grads() -> bool:
            if self._clipping is not None:
                self._clipping.clip()
            if not accepts_grad_norm(norms[0]):
                return False
            self.changes.check()
            counts = [[_copied(group.get("step")) for group in one.optimizer.param_groups] for one in self._stepped]
            for number, (optimizer, group, params) in enumerate(self._buckets):
                counted = counts[self._stepped.index(optimizer)]
                with _only(optimizer, params, counted), self.changes.recording(optimizer):
                    MixedPrecisionOptimizer.step_with_ready_grads(optimizer)
                group.start_param_sync(force_sync=True)
                self.changes.gather(group)
                hook(number, number == len(self._buckets) - 1)
            return True

        # Shadows the methods of its class
        self._optimizer.get_grad_norm, self._optimizer.step_with_ready_grads = get_grad_norm, step_with_ready_grads
        try:
            updated, _, _ = self._optimizer.step()
        finally:
            del self._optimizer.get_grad_norm, self._optimizer.step_with_ready_grads
        return updated, norms[0]


class ChangeTracker:
    """Implements `ChangeSource` for a rank's bfloat16 parameters; changes accumulate over updates until `clear`.

    Megatron's distributed optimizer keeps its part of the parameters in float32 and copies it over the model's
    parameters in bfloat16, after which each data-parallel rank gathers the parts of the others. Before the copy the old
    values are still there: they are compared with what replaces them, and the results, one bit an element, are gathered
    like the parameters. No copy of old values is kept. Parameters of other dtypes are not tracked: all of their
    elements count as changed. `bitmaps` has the names of `tensors`.
    """

    def __init__(self, modules: Sequence[DistributedDataParallel], tensors: Mapping[str, torch.Tensor]):
        buffers = [buffer for m in modules for buffer in (*m.buffers, *m.expert_parallel_buffers)]
        tracked = [buffer for buffer in buffers if buffer.param_dtype is torch.bfloat16]
        self._buckets = [bucket for buffer in tracked for bucket in buffer.buckets]
        # Two bytes more, so that every rank's part has the same number of whole bytes: see `gather`.
        self._bits = [
            torch.zeros(num_bytes(b.param_data.numel()) + 2, dtype=torch.uint8, device=b.param_data.device)
            for b in self._buckets
        ]
        self._number = {id(bucket): number for number, bucket in enumerate(self._buckets)}
        self._sums: list[torch.Tensor] = []
        self._tensors = tensors
        self.complete = False

    @property
    def elements(self) -> int:
        return sum(bucket.param_data.numel() for bucket in self._buckets)

    def count_changed(self) -> int:
        return sum(int(count_bits(part)) for bits in self._bits for part in bits.split(COMPARED_AT_ONCE // 8))

    def bitmaps(self) -> Changes:
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
        made = zip(self._buckets, self._sums, strict=True) if self._sums else ()  # with the sums after the last update
        if not all(bool(checksum(bucket.param_data) == before) for bucket, before in made):
            self.complete = False
        return self.complete

    def clear(self) -> None:
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
            shards, models = optimizer.shard_fp32_from_float16_groups, optimizer.model_float16_groups
            for main, model in zip(chain(*shards), chain(*models), strict=True):
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
        """Gather the bits of a bucket group of Megatron's DDP, whose ranks have just gathered its parameters."""
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


def _mark(bits: torch.Tensor, start: int, old: torch.Tensor, main: torch.Tensor) -> None:
    """Set the bits, from bit `start` on, of the elements that differ from what `main` will make of them."""
    for at in range(0, old.numel(), COMPARED_AT_ONCE):
        before = old[at : at + COMPARED_AT_ONCE]
        after = main.view(-1)[at : at + COMPARED_AT_ONCE].to(before.dtype)
        differ = before.view(torch.int16) != after.view(torch.int16)
        packed = pack_bits(torch.nn.functional.pad(differ, ((start + at) % 8, 0)))
        first = (start + at) // 8
        bits[first : first + len(packed)] |= packed


class SeparateClipping:
    """Clips the gradients of some parameters by a norm of their own, beside those of all others.

    To Megatron, which computes the norm of the others and clips them, these parameters have no gradients meanwhile.
    """

    def __init__(self, optimizer: ChainedOptimizer, stepped: Sequence[Any], parameters: Collection[torch.nn.Parameter]):
        """Clip parameters that are the same on the ranks that share them, maybe none; `stepped` are not stubs."""
        self._optimizer, models = optimizer, {id(parameter) for parameter in parameters}
        pairs = [pair for one in stepped for groups in _model_and_main(one) for pair in zip(*groups, strict=True)]
        self._apart = [main for model, main in pairs if id(model) in models]
        self._others = [main for model, main in pairs if id(model) not in models]
        self._grads: list[Any] = []
        self._norm = 0.0

    def begin(self) -> float:
        """Set the gradients aside, and return the norm of the others, or the own norm if it is not finite."""
        others = _take_grads(self._others)
        self._norm = _grad_norm(self._optimizer)
        _give_grads(self._others, others)
        self._grads = _take_grads(self._apart)
        norm = _grad_norm(self._optimizer)
        return norm if math.isfinite(self._norm) else self._norm

    def clip(self) -> None:
        """Put the gradients back, clipped."""
        _give_grads(self._apart, self._grads)
        self._grads = []
        limit = self._optimizer.config.clip_grad
        if self._apart and limit > 0.0:
            clip_grad_by_total_norm_fp32(self._apart, limit, self._norm)


def _grad_norm(optimizer: ChainedOptimizer) -> float:
    return float(type(optimizer).get_grad_norm(optimizer))


def _take_grads(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    grads = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    return grads


def _give_grads(parameters: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]) -> None:
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad


def place_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return a key of a tensor's memory: its storage, whose address may change, and the offset in elements."""
    return int(tensor.untyped_storage()._cdata), int(tensor.storage_offset())


def _first_layers_first(*kinds: Sequence[Any]) -> Iterator[Any]:
    """Yield groups of buckets, first layers first; Megatron fills them from the last layer on, for each kind."""
    found = [(-(i + 1) / len(groups), group) for groups in kinds for i, group in enumerate(groups)]
    return (group for _, group in sorted(found, key=lambda one: one[0]))  # stable: of equal ones, the first kind


# Attributes of a distributed optimizer: groups of a model's parameters, and of the shards that it updates for them
_GROUPS = (
    ("model_float16_groups", "shard_fp32_from_float16_groups"),
    ("model_fp32_groups", "shard_fp32_groups"),
)


def _model_and_main(optimizer: Any) -> Iterator[tuple[Sequence[Any], Sequence[Any]]]:
    """Yield groups of a model's parameters, each with the group of the shards that are updated for them."""
    for of_model, of_main in _GROUPS:
        yield from zip(getattr(optimizer, of_model), getattr(optimizer, of_main), strict=True)


@contextmanager
def _only(optimizer: Any, params: set[torch.nn.Parameter], counts: Sequence[Any]) -> Iterator[None]:
    """Restrict a distributed optimizer to these model parameters; `counts` as for `only_groups`."""
    kept: dict[str, list[list[Any]]] = {}
    mains: set[int] = set()
    for of_model, of_main in _GROUPS:
        kept[of_model], kept[of_main] = getattr(optimizer, of_model), getattr(optimizer, of_main)
        pairs = [
            [(model, main) for model, main in zip(*groups, strict=True) if model in params]
            for groups in zip(kept[of_model], kept[of_main], strict=True)
        ]
        mains |= {id(main) for group in pairs for _, main in group}
        setattr(optimizer, of_model, [[model for model, _ in group] for group in pairs])
        setattr(optimizer, of_main, [[main for _, main in group] for group in pairs])
    try:
        with only_groups(optimizer.optimizer, mains, counts):
            yield
    finally:
        for name, groups in kept.items():
            setattr(optimizer, name, groups)


@contextmanager
def only_groups(optimizer: torch.optim.Optimizer, mains: set[int], counts: Sequence[Any]) -> Iterator[None]:
    """Restrict an optimizer to these parameters, by id; `counts`: the steps of each group, where it counts by group."""
    kept = [group["params"] for group in optimizer.param_groups]
    for group, count in zip(optimizer.param_groups, counts, strict=True):
        group["params"] = [main for main in group["params"] if id(main) in mains]
        if group["params"] and count is None:
            group.pop("step", None)
        elif group["params"]:  # fused optimizers count by group: all buckets of a step are the same step
            group["step"] = _copied(count)
    try:
        yield
    finally:
        for group, params in zip(optimizer.param_groups, kept, strict=True):
            group["params"] = params


def _copied(count: Any) -> Any:
    return count.clone() if isinstance(count, torch.Tensor) else count
