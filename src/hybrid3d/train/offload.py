"""Frees memory that only training needs while vLLM generates, and restores it afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch

from hybrid3d.reshard.move.device import ON_CUDA, synchronize


class OffloadableMemory:
    """Offloads and onloads the memory of one model by kind: `parameters`, `gradients` and `optimizer`.

    Storages are freed and allocated again; views of them stay valid. Megatron's own offload of the optimizer is not
    used, because it gives each parameter new memory; in float32 that memory belongs to the model, too.
    """

    def __init__(self) -> None:
        # By kind, the freed storages, each with its bytes and the copy of its contents if these are kept
        self._offloaded: dict[str, list[tuple[torch.UntypedStorage, int, torch.UntypedStorage | None]]] = {}

    def offload(self, kinds: Mapping[str, Callable[[], Iterable[torch.Tensor]]]) -> int:
        """Free the storages of the tensors of these kinds, and return the bytes of all offloaded storages.

        Parameters and optimizer state are copied to the host first; the contents of gradients are discarded.
        A function for each kind returns its tensors, of which several may share a storage; kinds that are offloaded
        already are skipped.
        """
        for kind, tensors in kinds.items():
            if kind in self._offloaded:
                continue
            storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors()}.values()
            self._offloaded[kind] = [
                (storage, storage.nbytes(), None if kind == "gradients" else _copy_to_host(storage))
                for storage in storages
            ]
            synchronize()
            for storage in storages:
                storage.resize_(0)
        return sum(nbytes for storages in self._offloaded.values() for _, nbytes, _ in storages)

    def onload(self, *kinds: str) -> None:
        """Undo `offload` for these kinds, or for all kinds if none is given."""
        for kind in kinds or tuple(self._offloaded):
            storages = self._offloaded.pop(kind, [])
            for storage, nbytes, copy in storages:
                storage.resize_(nbytes)
                if copy is not None:
                    storage.copy_(copy, non_blocking=True)
            if storages:
                synchronize()


def _copy_to_host(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """Return a host copy of a storage, in pinned memory with CUDA; the copy may still be in progress."""
    copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=ON_CUDA).untyped_storage()
    copy.copy_(storage, non_blocking=True)
    return copy
