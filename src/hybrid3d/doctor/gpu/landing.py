"""A sink of plain tensors in place of vLLM, and a context in which the host must not wait for the GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch

from hybrid3d.reshard.move.executor import NamedTensors
from hybrid3d.reshard.plan.layout import Demand, Shape


class Landing(NamedTensors):
    """A sink of plain tensors, with what a sync asks of vLLM's weights."""

    finalize_bytes = 0

    def __init__(self, demand: Demand, tensors: Mapping[str, torch.Tensor]):
        self.demand = demand
        super().__init__(tensors)

    def prepare(self, layers: Sequence[int | None]) -> None: ...

    def begin(self) -> None: ...

    def end(self) -> None: ...


class LandingEngine:
    """What a sync asks of an engine."""

    weight_version: int | None = None
    discards_weights = False

    def __init__(self, sink: Landing):
        self._sink = sink

    def weights(self, shapes: Mapping[str, Shape]) -> Landing:
        return self._sink

    def reset_cache(self) -> None: ...


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
