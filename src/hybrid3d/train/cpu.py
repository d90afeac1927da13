"""Lets Megatron-Core run where there is no CUDA. On a machine that has it only `cuda_means(META)` is reached, to ask.

Megatron-Core writes `device="cuda"`, asks for CUDA streams and keeps CUDA random states. On a CPU those three are
answered with the CPU's own: `cuda_means(CPU)` redirects tensor placement, and `install()` replaces the handful of
`torch.cuda` entries that Megatron calls. Each entry names who calls it.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

CPU, META = torch.device("cpu"), torch.device("meta")


def _is_cuda(device: object) -> bool:
    if isinstance(device, int):  # the number of a GPU
        return not isinstance(device, bool)
    return isinstance(device, (str, torch.device)) and torch.device(device).type == "cuda"


class cuda_means(TorchFunctionMode):
    """Within this context a tensor that is asked for on CUDA is made, or stays, on another device."""

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
    """Replace what Megatron-Core calls of `torch.cuda`; call it once."""
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
    _mend_experts()
    _mend_uneven_collectives()


def _mend_experts() -> None:
    """Tensors lie in host memory already, and there is one stream."""
    from megatron.core.transformer.moe import token_dispatcher

    to_cpu = token_dispatcher.maybe_move_tensor_to_cpu

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        """The sizes of an all-to-all must be numbers; Megatron converts what comes from a GPU only."""
        moved = to_cpu(tensor, as_numpy, record_stream)
        return moved.numpy() if as_numpy and isinstance(moved, torch.Tensor) else moved

    token_dispatcher.maybe_move_tensor_to_cpu = to_host
    token_dispatcher.MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = _Stream()  # vLLM puts its own into torch.cuda later


def _mend_uneven_collectives() -> None:
    """Experts get different numbers of tokens, and gloo gathers and scatters equal shares only."""
    from megatron.core.tensor_parallel import mappings

    gather, scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gather_uneven(
        input_: torch.Tensor, group: dist.ProcessGroup, output_split_sizes: Any = None, use_global_buffer: bool = False
    ) -> torch.Tensor:
        if output_split_sizes is None or group.size() == 1:
            return gather(input_, group, output_split_sizes, use_global_buffer)
        rows = max(output_split_sizes)
        shares = input_.new_empty(group.size(), rows, *input_.shape[1:])
        shares[group.rank(), : len(input_)] = input_
        dist.all_gather(list(shares), shares[group.rank()].clone(), group=group)
        return torch.cat([share[:n] for share, n in zip(shares, output_split_sizes, strict=True)])

    def scatter_uneven(
        input_: torch.Tensor, group: dist.ProcessGroup, input_split_sizes: Any = None, use_global_buffer: bool = False
    ) -> torch.Tensor:
        if input_split_sizes is None or group.size() == 1:
            return scatter(input_, group, input_split_sizes, use_global_buffer)
        whole = input_.clone()
        dist.all_reduce(whole, group=group)
        return whole.split(input_split_sizes)[group.rank()].contiguous()

    mappings._gather_along_first_dim = gather_uneven
    mappings._reduce_scatter_along_first_dim = scatter_uneven
