"""Lets vLLM's CUDA build believe that this machine has eight GPUs of a kind, so that it chooses what it would there."""

from __future__ import annotations

import os
from dataclasses import dataclass

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HAS_FLASHINFER_CUBIN": "1",  # as in an image with FlashInfer's kernels
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True)
class Device:
    """What vLLM and PyTorch ask about a GPU.

    Attributes:
        capability: of its instructions, as CUDA numbers them.
        units: its streaming multiprocessors.
    """

    name: str
    capability: tuple[int, int]
    memory_bytes: int
    units: int


DEVICES = {
    "h100": Device("NVIDIA H100 80GB HBM3", (9, 0), 80 * 2**30, 132),
    "b200": Device("NVIDIA B200", (10, 0), 179 * 2**30, 148),
}


def install(device: Device) -> None:
    """Replace vLLM's platform; call it before any other module of vLLM is imported."""
    os.environ.update({name: value for name, value in ENVIRONMENT.items() if name not in os.environ})
    import vllm.platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class Faked(NonNvmlCudaPlatform):
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(*device.capability)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return device.name

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return device.memory_bytes

        @classmethod
        def device_count(cls) -> int:
            return 8

        @classmethod
        def is_integrated_gpu(cls, device_id: int = 0) -> bool:
            return False

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            return device.units

        @classmethod
        def is_fully_connected(cls, physical_device_ids: list[int]) -> bool:
            return True

    vllm.platforms._current_platform = Faked()
