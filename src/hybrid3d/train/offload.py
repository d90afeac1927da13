"""Offload: memory that only training needs is freed while vLLM generates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch

from hybrid3d.train.runtime import ON_CUDA, synchronize


class OffloadableMemory:
    """The memory of one model, by kind (`parameters`, `gradients`, `optimizer`): offloaded or in place."""

    def __init__(self) -> None:
        self._offloaded: dict[str, _OffloadedStorages] = {}

    def offload(self, kinds: Mapping[str, Callable[[], Iterable[torch.Tensor]]]) -> int:
        """Free the storages of the tensors of these kinds; return the bytes of all that is offloaded now.

        What is in gradients need not come back: they are not copied to the host.
        """
        for kind, tensors in kinds.items():
            if kind not in self._offloaded:
                self._offloaded[kind] = _OffloadedStorages(tensors(), kept=kind != "gradients")
        return sum(one.nbytes for one in self._offloaded.values())

    def onload(self, *kinds: str) -> None:
        """Undo `offload`, for these kinds alone if any are given."""
        for kind in kinds or tuple(self._offloaded):
            if kind in self._offloaded:
                self._offloaded.pop(kind).restore()


class _OffloadedStorages:
    """Storages that are empty from when this is made until `restore`; views of them stay valid.

    Megatron's own offload of the optimizer moves each parameter to other memory, which in float32 is the model's too.

    Attributes:
        nbytes: of the storages.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], kept: bool = True):
        """
        Args:
            tensors: several may share a storage, which is offloaded as a whole.
            kept: False where the contents need not come back.
        """
        memories = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}.values()
        self._memories = [(memory, memory.nbytes()) for memory in memories]
        self.nbytes = sum(nbytes for _, nbytes in self._memories)
        self._copies = [_on_host(memory) if kept else None for memory in memories]
        synchronize()
        for memory, _ in self._memories:
            memory.resize_(0)

    def restore(self) -> None:
        """Allocate the storages again, with their contents where they were kept."""
        for (memory, nbytes), copy in zip(self._memories, self._copies, strict=True):
            memory.resize_(nbytes)
            if copy is not None:
                memory.copy_(copy, non_blocking=True)
        synchronize()


def _on_host(memory: torch.UntypedStorage) -> torch.UntypedStorage:
    copy = torch.empty(memory.nbytes(), dtype=torch.uint8, pin_memory=ON_CUDA).untyped_storage()
    copy.copy_(memory, non_blocking=True)
    return copy
