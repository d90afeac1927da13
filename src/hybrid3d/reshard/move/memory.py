"""Device memory that is allocated only while it is used, with views that stay valid."""

from __future__ import annotations

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
