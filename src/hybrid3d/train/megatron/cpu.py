"""The CPU backend: lets Megatron-Core run where there is no CUDA. With CUDA only `cuda_means(META)` is used, to query.

Megatron-Core writes `device="cuda"`, asks for CUDA streams and keeps CUDA random states. On a CPU `cuda_means(CPU)`
redirects tensor placement, and `install()` replaces the functions of `torch.cuda` that Megatron calls.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from hybrid3d.patches import set_existing

CPU, META = torch.device("cpu"), torch.device("meta")


def _is_cuda(device: object) -> bool:
    if isinstance(device, int):  # the number of a GPU
        return not isinstance(device, bool)
    return isinstance(device, (str, torch.device)) and torch.device(device).type == "cuda"


class cuda_means(TorchFunctionMode):
    """Context in which tensors requested on CUDA are created, or stay, on another device."""

    def __init__(self, device: torch.device):
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = self._device
        kwargs.pop("pin_memory", None)
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], self._device, *args[2:])
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # The mixed-precision optimizers group parameters by this type name and support only CUDA's.
            return func(*args).replace("torch.", "torch.cuda.")
        return func(*args, **kwargs)


class Stream:
    """Stands in for a CUDA stream on a CPU, where everything runs in order."""

    def __init__(self, *args: Any, **kwargs: Any): ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: Any = None) -> Event:
        return Event()


class Event:
    def __init__(self, *args: Any, **kwargs: Any): ...

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...


# The functions of `torch.cuda` that Megatron calls, and where
TORCH_CUDA = {
    "current_device": lambda: CPU,  # parallel layers, rotary embedding, optimizer
    "synchronize": lambda device=None: None,  # timers
    "current_stream": lambda device=None: Stream(),  # gradient buffers of DDP
    "default_stream": lambda device=None: Stream(),
    "Stream": Stream,  # DDP, dist_checkpointing
    "Event": Event,
    "stream": lambda stream: contextlib.nullcontext(),
    "is_current_stream_capturing": lambda: False,
    "get_rng_state": lambda device=None: torch.get_rng_state(),  # tensor_parallel.random
    "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
    "manual_seed": torch.manual_seed,
}


@contextlib.contextmanager
def current_device_is(device: torch.device) -> Iterator[None]:
    """Make another device the current one, where Megatron makes tensors that are not parameters (YaRN's tables)."""
    cuda: Any = torch.cuda  # whose function returns a number
    before, cuda.current_device = cuda.current_device, lambda: device
    try:
        yield
    finally:
        cuda.current_device = before


def install() -> None:
    """Replace the functions of `torch.cuda` that Megatron-Core calls; call it once before importing Megatron."""
    set_existing(f"torch=={torch.__version__}", torch.cuda, **TORCH_CUDA)
