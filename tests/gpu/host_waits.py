"""A context in which the host must not wait for the GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def no_synchronization(device: str) -> Iterator[None]:
    """Let torch raise an error where the host waits for the GPU; does nothing on `cpu`."""
    if device != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
