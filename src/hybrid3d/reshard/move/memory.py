"""Device memory that is allocated only while it is used, with views that stay valid; and copies.

Copies between strided views run together, with as few launches as possible.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import torch

from hybrid3d.reshard.plan.layout import Shape, View

ALIGNMENT = 64


def strided_view(tensor: torch.Tensor, view: View, size: Shape) -> torch.Tensor:
    """Return the part of a tensor that `view` describes, with shape `size`."""
    return tensor.as_strided(size, view.stride, tensor.storage_offset() + view.offset)


def align_up(nbytes: int) -> int:
    """Round a size up to a multiple of `ALIGNMENT`, which is enough for every kernel that reads the memory."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class DeviceBuffer:
    """A buffer on a device that is allocated and released as a whole; views into it stay valid.

    A CPU buffer is never released: faulting its pages in again would cost more than the copies that use it.
    """

    def __init__(self, nbytes: int, device: torch.device | str):
        self._bytes = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._kept = self._bytes.device.type == "cpu"

    @property
    def nbytes(self) -> int:
        return self._bytes.numel()

    def contains(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor lies in this buffer."""
        return bool(tensor.untyped_storage()._cdata == self._bytes.untyped_storage()._cdata)

    def flat_view(self, at: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a 1-D view of `nbytes` bytes from byte `at` on; call it while the buffer is allocated."""
        return self._bytes[at : at + nbytes].view(dtype)

    def allocate(self) -> None:
        if not self._kept:
            self._bytes.untyped_storage().resize_(self.nbytes)

    def release(self) -> None:
        if not self._kept:
            self._bytes.untyped_storage().resize_(0)


Copy = tuple[torch.Tensor, torch.Tensor]
"""A target, and the source of the same shape that is copied into it."""


WIDER = (torch.complex128, torch.int64, torch.int32, torch.int16)  # 16, 8, 4 and 2 bytes


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
                if target.is_cuda and not dense:
                    target, source = widen(target, source)
                batch = by_kind.setdefault((dense, target.dtype, source.dtype), ([], []))
                batch[0].append(target)
                batch[1].append(source)
            self._batches = list(by_kind.values())
        return self._batches


def widen(target: torch.Tensor, source: torch.Tensor) -> Copy:
    """Return the same copy with the largest elements that both views can be divided into.

    The kernel of a GPU that copies views with gaps moves one element at a time: 16 bytes at once are faster than two.
    """
    if target.dtype != source.dtype:
        return target, source
    for dtype in WIDER:
        times = dtype.itemsize // target.element_size()
        if times > 1 and all(_divides(view, times, dtype.itemsize) for view in (target, source)):
            return target.view(dtype), source.view(dtype)
    return target, source


def _divides(view: torch.Tensor, times: int, nbytes: int) -> bool:
    """Return whether elements that are `times` as long, of `nbytes`, can show the same memory."""
    if not view.dim() or view.stride(-1) != 1 or view.data_ptr() % nbytes:
        return False
    return all(n % times == 0 for n in (view.storage_offset(), view.size(-1), *view.stride()[:-1]))


def merge_copies(copies: Iterable[Copy]) -> Iterator[Copy]:
    """Yield the same copies, of which those of equal views at equal distances in memory are merged into one.

    The targets must not overlap. A merged copy has one dim more, in front.
    """
    equal_views: dict[object, list[Copy]] = defaultdict(list)
    for target, source in copies:
        equal_views[_form(target), _form(source)].append((target, source))
    for group in equal_views.values():
        group.sort(key=lambda copy: copy[0].storage_offset())
        for target, source in merge_consecutive(group):
            yield target, source


def merge_consecutive(rows: Sequence[tuple[torch.Tensor, ...]]) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield rows of views, of which consecutive rows of equal views at equal distances are merged into one.

    The views of a merged row have one dim more, in front.
    """
    first = 0
    while first < len(rows):
        steps, last = _steps(rows, first), first + 1
        while last < len(rows) and steps is not None and _steps(rows, last - 1) == steps:
            last += 1
        if steps is None:
            yield rows[first]
        else:
            yield tuple(
                view.as_strided((last - first, *view.shape), (step, *view.stride()), view.storage_offset())
                for view, step in zip(rows[first], steps, strict=True)
            )
        first = last


def _form(view: torch.Tensor) -> tuple[object, ...]:
    """Return what two views must have in common to be merged."""
    return view.untyped_storage()._cdata, view.dtype, view.shape, view.stride()


def _steps(rows: Sequence[tuple[torch.Tensor, ...]], index: int) -> tuple[int, ...] | None:
    """Return the distance from each view of a row to that of the next row, in elements; None if they cannot merge."""
    if index + 1 == len(rows):
        return None
    pairs = list(zip(rows[index], rows[index + 1], strict=True))
    if any(_form(view) != _form(following) for view, following in pairs):
        return None
    steps = tuple(int(following.storage_offset() - view.storage_offset()) for view, following in pairs)
    return steps if min(steps) > 0 else None
