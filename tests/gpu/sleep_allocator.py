"""vLLM's allocator of memory that sleeps, also where the rest of vLLM is not installed.

Besides a whole vLLM, its compiled module `vllm/cumem_allocator.abi3.so` and the Python files of
`vllm/device_allocator/` are enough, in a folder on Python's path. What these files import of the rest of vLLM is then
replaced by the few functions that they use of it.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

CUDA_MEMCPY_DEFAULT = 4  # cudaMemcpyKind: the runtime finds out where both addresses are


def load_sleep_allocator() -> Any:
    """Return vLLM's `CuMemAllocator`, of which a process has one.

    Raises:
        ModuleNotFoundError: vLLM's compiled allocator is not there.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is not None and spec.origin is None:  # a folder without `__init__.py`
        _replace_the_rest_of_vllm()
    from vllm.device_allocator.cumem import CuMemAllocator

    return CuMemAllocator.get_instance()


def _replace_the_rest_of_vllm() -> None:
    platform = SimpleNamespace(is_rocm=lambda: False, is_cuda_alike=lambda: True, is_xpu=lambda: False)
    modules: dict[str, dict[str, Any]] = {
        "logger": {"init_logger": logging.getLogger},
        "platforms": {"current_platform": platform},
        "utils": {},
        "utils.system_utils": {"find_loaded_library": _find_loaded_library},
        "utils.torch_utils": {"PIN_MEMORY": True},
        "distributed": {},
        "distributed.device_communicators": {},
        "distributed.device_communicators.cuda_wrapper": {"CudaRTLibrary": _CudaRuntime},
    }
    for name, attributes in modules.items():
        module = ModuleType(f"vllm.{name}")
        module.__path__ = []
        vars(module).update(attributes)
        sys.modules[module.__name__] = module


def _find_loaded_library(name: str) -> str | None:
    """Return the file of a shared library of this process, by the beginning of its name; None if it has none."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        at = line.find("/")
        if at >= 0 and Path(line[at:].strip()).name.startswith((f"{name}.", f"{name}-")):
            return line[at:].strip()
    return None


class _CudaRuntime:
    """The functions of the CUDA runtime that the allocator calls."""

    def __init__(self) -> None:
        path = _find_loaded_library("libcudart")
        if path is None:
            raise RuntimeError("libcudart is not loaded: this PyTorch was built without CUDA")
        self._library = ctypes.CDLL(path)

    def cudaMemcpy(self, dst: int, src: int, count: int) -> None:
        pointers = ctypes.c_void_p(dst), ctypes.c_void_p(src)
        code = self._library.cudaMemcpy(*pointers, ctypes.c_size_t(count), CUDA_MEMCPY_DEFAULT)
        if code:
            raise RuntimeError(f"cudaMemcpy of {count} bytes failed with error {code}")
