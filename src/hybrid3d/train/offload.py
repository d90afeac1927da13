"""Memory that only training needs, given up while vLLM generates."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hybrid3d.train.runtime import ON_CUDA, synchronize


class OffloadedMemory:
    """The memory of tensors, from when this is made until `restore`; views of it, whoever has them, stay good.

    Megatron's own for the optimizer puts each parameter elsewhere, which in float32 tears it off the model's.

    Attributes:
        nbytes: of it.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], kept: bool = True):
        """
        Args:
            tensors: of which several may lie in one memory, which goes as a whole.
            kept: False where what is in it need not come back.
        """
        memories = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}.values()
        self._memories = [(memory, memory.nbytes()) for memory in memories]
        self.nbytes = sum(nbytes for _, nbytes in self._memories)
        self._copies = [_on_host(memory) if kept else None for memory in memories]
        synchronize()
        for memory, _ in self._memories:
            memory.resize_(0)

    def restore(self) -> None:
        """Back as it was, but that what was not kept may be anything."""
        for (memory, nbytes), copy in zip(self._memories, self._copies, strict=True):
            memory.resize_(nbytes)
            if copy is not None:
                memory.copy_(copy, non_blocking=True)
        synchronize()


def _on_host(memory: torch.UntypedStorage) -> torch.UntypedStorage:
    copy = torch.empty(memory.nbytes(), dtype=torch.uint8, pin_memory=ON_CUDA).untyped_storage()
    copy.copy_(memory, non_blocking=True)
    return copy
