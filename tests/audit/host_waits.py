"""Sees what makes a host wait for its GPU, where the GPU's tensors lie on the CPU: `cpu:0` stands for the GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode, resolve_name

GPU = torch.device("cpu", 0)  # PyTorch makes no difference between it and `cpu`; who asks for it can be told apart

COPIES = (torch.tensor, torch.as_tensor)  # of values of the host, from pageable memory
READS = {
    *(torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu, torch.Tensor.__bool__),
    *(torch.Tensor.__int__, torch.Tensor.__float__, torch.Tensor.__index__, torch.Tensor.nonzero, torch.nonzero),
    *(torch.equal, torch.Tensor.equal, torch.allclose, torch.Tensor.allclose, torch.unique, torch.masked_select),
}


class HostWaits(TorchFunctionMode):
    """While it is entered, lists the calls that synchronize a stream on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        on_gpu = device is not None and torch.device(device) == GPU
        if (func in COPIES and on_gpu) or func in READS:
            self.calls.append(resolve_name(func) or func.__name__)
        return func(*args, **kwargs)

    def install(self) -> None:
        """Count explicit synchronizations, too."""
        for owner in (torch.cuda, torch.accelerator):
            owner.synchronize = lambda *unused, **also_unused: self.calls.append("synchronize")
