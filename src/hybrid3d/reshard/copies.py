"""Copies between strided views that run together, with as few launches as possible."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

import torch

Copy = tuple[torch.Tensor, torch.Tensor]
"""A target, and the source of the same shape that is copied into it."""


class BatchedCopies:
    """Copies that are set up once and run together any number of times.

    Equal copies at equal distances, such as those of the experts of a layer, are merged into one. Of the others, those
    of contiguous tensors of one dtype take one launch on a GPU. The memory of all tensors must stay where it is.
    """

    def __init__(self) -> None:
        self._added: list[Copy] = []
        self._batches: list[tuple[list[torch.Tensor], list[torch.Tensor]]] | None = None

    def add(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._added.append((target, source))
        self._batches = None

    def __len__(self) -> int:
        """Return the number of copies, after merging."""
        return sum(len(targets) for targets, _ in self.merge())

    def run(self) -> None:
        for targets, sources in self.merge():
            torch._foreach_copy_(targets, sources)

    def merge(self) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
        """Merge the copies, unless that is done, and return them in batches of contiguous tensors and of others.

        Call it while all of their memory is allocated.
        """
        if self._batches is None:
            by_kind: dict[tuple[bool, torch.dtype, torch.dtype], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
            for target, source in merge_copies(self._added):
                dense = target.is_contiguous() and source.is_contiguous()
                batch = by_kind.setdefault((dense, target.dtype, source.dtype), ([], []))
                batch[0].append(target)
                batch[1].append(source)
            self._batches = list(by_kind.values())
        return self._batches


def merge_copies(copies: Iterable[Copy]) -> Iterator[Copy]:
    """Yield the same copies, of which those of equal views at equal distances in memory are merged into one.

    The targets must not overlap. A merged copy has one dim more, in front.
    """
    equal_views: dict[object, list[Copy]] = defaultdict(list)
    for target, source in copies:
        equal_views[target.shape, _place_and_form(target), _place_and_form(source)].append((target, source))
    for group in equal_views.values():
        group.sort(key=lambda copy: copy[0].storage_offset())
        first = 0
        while first < len(group):
            steps = _steps(group, first)
            last = first + 1
            while last < len(group) and steps is not None and _steps(group, last - 1) == steps:
                last += 1
            yield group[first] if steps is None else _spanning(group[first:last], steps)
            first = last


def _place_and_form(tensor: torch.Tensor) -> tuple[int, torch.dtype, tuple[int, ...]]:
    return tensor.untyped_storage()._cdata, tensor.dtype, tensor.stride()


def _steps(group: list[Copy], index: int) -> tuple[int, int] | None:
    """Return how far the next target and source lie behind these, in elements; None if they do not."""
    if index + 1 == len(group):
        return None
    (target, source), (next_target, next_source) = group[index : index + 2]
    target_step = int(next_target.storage_offset() - target.storage_offset())
    source_step = int(next_source.storage_offset() - source.storage_offset())
    return (target_step, source_step) if min(target_step, source_step) > 0 else None


def _spanning(copies: list[Copy], steps: tuple[int, int]) -> Copy:
    target, source = (
        first.as_strided((len(copies), *first.shape), (step, *first.stride()), first.storage_offset())
        for first, step in zip(copies[0], steps, strict=True)
    )
    return target, source
