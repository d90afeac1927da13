"""What a GPU and its links can do: the named machines, and a recipe's own numbers in place of theirs."""

from __future__ import annotations

from dataclasses import dataclass

from hybrid3d.config import Machine

GB = 10**9


@dataclass(frozen=True)
class Hardware:
    """Of one GPU. Rates are bytes per second; those of links are in each of the two directions.

    Attributes:
        memory: bytes, as its data sheet says; what a device has beyond that is left to contexts and NCCL.
        copies: of its own memory: a byte that is copied is read and written.
        nvlink: to the other GPUs of its node, together.
        network: to other nodes.
    """

    memory_bytes: float
    memory_bandwidth: float
    nvlink_bandwidth: float
    network_bandwidth: float


# Data sheets of NVIDIA's A100 80GB SXM, H100 SXM and H200 SXM; NVLink is quoted there for both directions together.
# The last number of a name is the network adapter's rate in Gb/s, one adapter to each GPU.
_MACHINES = {
    "a100-8x200g": Hardware(80 * GB, 2039 * GB, 300 * GB, 25 * GB),
    "h100-8x400g": Hardware(80 * GB, 3350 * GB, 450 * GB, 50 * GB),
    "h200-8x400g": Hardware(141 * GB, 4800 * GB, 450 * GB, 50 * GB),
}


def hardware_of(machine: Machine) -> Hardware:
    """The machine that a recipe names, with the numbers that it says itself."""
    named = _MACHINES[machine.kind]

    def overridden(value: float | None, default: float) -> float:
        return default if value is None else value * GB

    return Hardware(
        memory_bytes=overridden(machine.memory_gb, named.memory_bytes),
        memory_bandwidth=overridden(machine.copies_gb_per_s, named.memory_bandwidth),
        nvlink_bandwidth=overridden(machine.nvlink_gb_per_s, named.nvlink_bandwidth),
        network_bandwidth=overridden(machine.network_gb_per_s, named.network_bandwidth),
    )
