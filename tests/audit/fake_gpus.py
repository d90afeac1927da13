"""Eight GPUs that are not there: what would make a CUDA context on one of them, or allocate memory there, is counted.

PyTorch's functions about devices, streams and random states are replaced; tensors on GPUs are made on the CPU, which a
dispatch mode sees whatever code makes them. An allocation makes a context on its device. As with CUDA 12 and later,
setting a device makes a context there too, and so do streams, pinned memory and questions about free memory.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from audit.fake_device import DEVICES, Device

COUNT = 8


class _Numbered(TorchFunctionMode):
    """Names the GPU that a tensor is moved to, for which PyTorch would ask the driver."""

    def __init__(self, gpus: FakeGpus):
        super().__init__()
        self._gpus = gpus

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            device = args[1] if len(args) > 1 else kwargs.pop("device", None)
            return args[0].to(torch.device("cuda", self._gpus.number(device)), **kwargs)
        if func is torch.Tensor.to and len(args) > 1 and str(args[1]) == "cuda":
            args = (args[0], torch.device("cuda", self._gpus.number()), *args[2:])
        return func(*args, **kwargs)


class FakeGpus(TorchDispatchMode):
    """The GPUs, for this process; enter it to count.

    Attributes:
        contexts: by device, how often a context was made or needed there.
        nbytes: by device, the bytes allocated.
    """

    def __init__(self, device: Device):
        super().__init__()
        self._device = device
        self._numbered = _Numbered(self)
        self.contexts: Counter[int] = Counter()
        self.nbytes: Counter[int] = Counter()
        self._current = 0

    def __enter__(self) -> FakeGpus:
        self._numbered.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._numbered.__exit__(*error)

    def forget(self, current: int = 0) -> None:
        """Begin anew, in a process without contexts whose current device is this one."""
        self.contexts.clear()
        self.nbytes.clear()
        self._current = current

    def number(self, device: Any = None) -> int:
        """Return the number of a device as PyTorch's functions take it; None, and `cuda` alone, are the current one."""
        index = device if isinstance(device, int) else torch.device(device or "cuda").index
        return self._current if index is None else index

    def use(self, device: Any = None) -> int:
        """Count a context on a device, and return its number."""
        self.contexts[self.number(device)] += 1
        return self.number(device)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("pin_memory"):
            self.use()
            kwargs["pin_memory"] = False
        device = kwargs.get("device")
        if device is None or torch.device(device).type != "cuda":
            return func(*args, **kwargs)
        made = func(*args, **(kwargs | {"device": torch.device("cpu")}))
        if made.untyped_storage().nbytes():
            self.nbytes[self.use(device)] += made.untyped_storage().nbytes()
        return made

    def install(self) -> None:
        """Replace PyTorch's functions; call it before the engines are imported."""
        gpus = self

        class Stream:
            def __init__(self, device: Any = None, *unused: Any, **also_unused: Any):
                gpus.use(device)

            def __getattr__(self, name: str) -> Any:
                return lambda *unused, **also_unused: None

        class Event:
            def __init__(self, *unused: Any, **also_unused: Any): ...

            def __getattr__(self, name: str) -> Any:
                return lambda *unused, **also_unused: gpus.use() and None

        default_stream = Stream.__new__(Stream)
        major, minor = self._device.capability
        properties = SimpleNamespace(
            name=self._device.name,
            major=major,
            minor=minor,
            total_memory=self._device.memory_bytes,
            multi_processor_count=self._device.units,
        )

        @contextlib.contextmanager
        def on_device(device: Any) -> Iterator[None]:
            previous = gpus._current
            gpus._set(device)
            yield
            gpus._current = previous

        random = dict(
            get_rng_state=lambda device=None: torch.get_rng_state(),
            set_rng_state=lambda state, device=None: torch.set_rng_state(state),
            manual_seed=torch.manual_seed,
        )
        replaced = dict(
            is_available=lambda: True,
            is_initialized=lambda: True,
            device_count=lambda: COUNT,
            current_device=lambda: gpus._current,
            set_device=gpus._set,
            device=on_device,
            Stream=Stream,
            Event=Event,
            current_stream=lambda device=None: default_stream,
            default_stream=lambda device=None: default_stream,
            stream=lambda stream: contextlib.nullcontext(),
            synchronize=lambda device=None: gpus.use(device) and None,
            mem_get_info=lambda device=None: (
                gpus.use(device) * 0 + properties.total_memory - 2**30,
                properties.total_memory,
            ),
            empty_cache=lambda: None,
            get_device_properties=lambda device=None: properties,
            get_device_capability=lambda device=None: (major, minor),
            get_device_name=lambda device=None: properties.name,
            **random,
            is_current_stream_capturing=lambda: False,
            default_generators=tuple(torch.Generator() for _ in range(COUNT)),
            _lazy_init=lambda: None,
            _lazy_call=lambda call, **unused: call(),
        )
        for name, value in replaced.items():
            setattr(torch.cuda, name, value)
        for name, value in random.items():
            setattr(torch.cuda.random, name, value)
        torch.accelerator.current_device_index = lambda: gpus._current

    def _set(self, device: Any) -> None:
        self._current = self.use(device)


def installed(device: str = "h100") -> FakeGpus:
    """Return new GPUs of a kind in place of the machine's, to be entered before the engines are imported."""
    gpus = FakeGpus(DEVICES[device])
    gpus.install()
    return gpus
