"""Memory that is there only while it is used, and views of it that stay."""

from __future__ import annotations

import torch

from hybrid3d.reshard.layout import Shape, View

ALIGNED = 64


def strided(tensor: torch.Tensor, view: View, size: Shape) -> torch.Tensor:
    """What a view says, of the tensor that it names."""
    return tensor.as_strided(size, view.stride, tensor.storage_offset() + view.offset)


def aligned(nbytes: int) -> int:
    """Rounded up, so that what lies behind begins at a multiple of what any kernel asks for."""
    return -(-nbytes // ALIGNED) * ALIGNED


class Memory:
    """Bytes on a device, taken and given back as a whole; tensors in them keep their places.

    On a CPU they are kept: pages that the system has taken back cost more than the copies that need them.
    """

    def __init__(self, nbytes: int, device: torch.device | str):
        self._bytes = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._kept = self._bytes.device.type == "cpu"

    @property
    def nbytes(self) -> int:
        return self._bytes.numel()

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in here."""
        return bool(tensor.untyped_storage()._cdata == self._bytes.untyped_storage()._cdata)

    def flat(self, at: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
        """The tensor of one dim that lies from byte `at` on; made while the memory is there."""
        return self._bytes[at : at + nbytes].view(dtype)

    def take(self) -> None:
        if not self._kept:
            self._bytes.untyped_storage().resize_(self.nbytes)

    def give_back(self) -> None:
        if not self._kept:
            self._bytes.untyped_storage().resize_(0)
