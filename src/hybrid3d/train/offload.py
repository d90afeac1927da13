"""Frees memory that only training needs while vLLM generates, and restores it afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch

from hybrid3d.reshard.move.device import ON_CUDA, synchronize


class OffloadableMemory:
    """Offloads and onloads the memory of one model by kind: `parameters`, `gradients` and `optimizer`."""

    def __init__(self) -> None:
        self._offloaded: dict[str, _OffloadedStorages] = {}

    def offload(self, kinds: Mapping[str, Callable[[], Iterable[torch.Tensor]]]) -> int:
        """Free the storages of the tensors of these kinds, and return the bytes of all offloaded storages.

        Parameters and optimizer state are copied to the host first; the contents of gradients are discarded.

        Args:
            kinds: for each kind, a function that returns its tensors; a kind that is offloaded already is skipped.
        """
        for kind, tensors in kinds.items():
            if kind not in self._offloaded:
                self._offloaded[kind] = _OffloadedStorages(tensors(), keep_contents=kind != "gradients")
        return sum(storages.nbytes for storages in self._offloaded.values())

    def onload(self, *kinds: str) -> None:
        """Undo `offload` for these kinds, or for all kinds if none is given."""
        for kind in kinds or tuple(self._offloaded):
            if kind in self._offloaded:
                self._offloaded.pop(kind).restore()


class _OffloadedStorages:
    """Storages that are freed on construction and allocated again by `restore`; views of them stay valid.

    Megatron's own offload of the optimizer is not used, because it gives each parameter new memory; in float32 that
    memory belongs to the model, too.

    Attributes:
        nbytes: the bytes of all storages.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], keep_contents: bool = True):
        """
        Args:
            tensors: tensors whose whole storages are offloaded; several may share one storage.
            keep_contents: whether to copy the contents to the host, so that `restore` restores them.
        """
        storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}.values()
        self._storages = [(storage, storage.nbytes()) for storage in storages]
        self.nbytes = sum(nbytes for _, nbytes in self._storages)
        self._copies = [_copy_to_host(storage) if keep_contents else None for storage in storages]
        synchronize()
        for storage, _ in self._storages:
            storage.resize_(0)

    def restore(self) -> None:
        """Allocate the storages again, and copy back their contents if they were kept."""
        for (storage, nbytes), copy in zip(self._storages, self._copies, strict=True):
            storage.resize_(nbytes)
            if copy is not None:
                storage.copy_(copy, non_blocking=True)
        synchronize()


def _copy_to_host(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """Return a host copy of a storage, in pinned memory with CUDA; the copy may still be in progress."""
    copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=ON_CUDA).untyped_storage()
    copy.copy_(storage, non_blocking=True)
    return copy
