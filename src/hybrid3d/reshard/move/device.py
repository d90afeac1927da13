"""The device of this rank, and the stream beside the one on which it computes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

ON_CUDA = torch.cuda.is_available()


def device() -> torch.device:
    """Return the device of this rank."""
    return torch.device("cuda", torch.cuda.current_device()) if ON_CUDA else torch.device("cpu")


def synchronize() -> None:
    """Wait until this rank's GPU is idle, to measure time; does nothing without a GPU."""
    if ON_CUDA:
        torch.cuda.synchronize()


class SideStream:
    """A second CUDA stream; without a GPU everything runs in order."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream() if ON_CUDA else None

    @contextlib.contextmanager
    def behind(self) -> Iterator[None]:
        """Launch work on the side stream, ordered after all work launched on the current stream so far."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield
