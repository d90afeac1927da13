"""Lets Megatron-Core run where there is no CUDA. Nothing here is reached on a machine that has it.

Megatron-Core writes `device="cuda"`, asks for CUDA streams and keeps CUDA random states. On a CPU those three are
answered with the CPU's own: `cuda_means_cpu()` redirects tensor placement, and `install()` replaces the handful of
`torch.cuda` entries that Megatron calls. Each entry names who calls it.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


def _is_cuda(device: object) -> bool:
    return torch.device(device).type == "cuda" if isinstance(device, (str, torch.device)) else False


class cuda_means_cpu(TorchFunctionMode):
    """Within this context a tensor that is asked for on CUDA is made, or stays, on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], CPU, *args[2:])
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # the mixed-precision optimizers sort parameters by this name and know only CUDA's
            return func(*args).replace("torch.", "torch.cuda.")
        return func(*args, **kwargs)


class _Stream:
    """The one stream of a CPU: everything on it is already in order."""

    def __init__(self, *args: Any, **kwargs: Any): ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: Any = None) -> _Event:
        return _Event()


class _Event:
    def __init__(self, *args: Any, **kwargs: Any): ...

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...


def install() -> None:
    """Replace what Megatron-Core calls of `torch.cuda`, and mend its use of torch's Adam; call it once."""
    cuda = torch.cuda
    cuda.current_device = lambda: CPU  # parallel layers, rotary embedding, optimizer
    cuda.synchronize = lambda device=None: None  # timers
    cuda.current_stream = lambda device=None: _Stream()  # gradient buffers of DDP
    cuda.default_stream = lambda device=None: _Stream()
    cuda.Stream, cuda.Event = _Stream, _Event  # DDP, dist_checkpointing
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.is_current_stream_capturing = lambda: False
    cuda.get_rng_state = lambda device=None: torch.get_rng_state()  # tensor_parallel.random
    cuda.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    cuda.manual_seed = torch.manual_seed
    import megatron.core.tensor_parallel.random as random

    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    _keep_adam_steps()


def _keep_adam_steps() -> None:
    """Torch's Adam counts its steps in a tensor per parameter, which Megatron saves and loads apart, then misses."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    set_states = DistributedOptimizer._set_main_param_and_optimizer_states

    def set_states_but_steps(self: Any, model_param: Any, tensors: dict[str, torch.Tensor]) -> None:
        group, place = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][place]]
        set_states(self, model_param, {"step": state["step"], **tensors} if "step" in state else tensors)

    DistributedOptimizer._set_main_param_and_optimizer_states = set_states_but_steps
