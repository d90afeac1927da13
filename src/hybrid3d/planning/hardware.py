"""Memory and bandwidths of GPUs: the named machines, and the numbers of a recipe that replace theirs.

`total_memory` is the memory of this machine, or of this container.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from hybrid3d.config import Machine

GB = 10**9


@dataclass(frozen=True)
class Hardware:
    """Memory and speeds of one GPU. Bandwidths are in bytes per second; those of links hold for each direction.

    Attributes:
        memory_bytes: as torch reports it, of which vLLM takes its fraction: a GPU of 80 GiB has 85 GB.
        memory_bandwidth: of its own memory; a copy reads and writes each byte.
        nvlink_bandwidth: to all other GPUs of its node together.
        network_bandwidth: to other nodes.
        launch_seconds: in which the host starts an operation of torch: assumed.
        wait_seconds: in which the host waits for a result that is ready, and starts again: assumed.
        serial: whether one processor copies and sends, in turns.
        host_bytes: memory of a node of eight GPUs: 2 TB in the data sheets of NVIDIA's DGX A100 640GB, H100 and H200.
    """

    memory_bytes: float
    memory_bandwidth: float
    nvlink_bandwidth: float
    network_bandwidth: float
    launch_seconds: float = 5e-6
    wait_seconds: float = 20e-6
    serial: bool = False
    host_bytes: float = 2000 * GB


# Data sheets of NVIDIA's A100 80GB SXM, H100 SXM and H200 SXM; NVLink is quoted there for both directions together.
# Their memory is that which torch reports: 85.0 GB on an H100 (`benchmarks/results/gpu-check-h100.json`), as much is
# assumed for an A100, and 150 GB for an H200.
# The last number of a name is the network adapter's rate in Gb/s, one adapter to each GPU.
_MACHINES = {
    "a100-8x200g": Hardware(85 * GB, 2039 * GB, 300 * GB, 25 * GB),
    "h100-8x400g": Hardware(85 * GB, 3350 * GB, 450 * GB, 50 * GB),
    "h200-8x400g": Hardware(150 * GB, 4800 * GB, 450 * GB, 50 * GB),
}

# A core of a CPU, for the choice between syncs: memory as in the copies of benchmarks/results/reshard-cpu.md, gloo over
# the loopback device as in its wire, and 10 Gb/s Ethernet. No operation has to be waited for.
CPU = Hardware(0.0, 10 * GB, 1.5 * GB, 1.25 * GB, launch_seconds=2e-6, wait_seconds=0.0, serial=True)


def hardware_of(machine: Machine) -> Hardware:
    """Return the machine that a recipe names, with the numbers that the recipe sets itself."""
    named = _MACHINES[machine.kind]

    def overridden(value: float | None, default: float) -> float:
        return default if value is None else value * GB

    return Hardware(
        memory_bytes=overridden(machine.memory_gb, named.memory_bytes),
        memory_bandwidth=overridden(machine.copies_gb_per_s, named.memory_bandwidth),
        nvlink_bandwidth=overridden(machine.nvlink_gb_per_s, named.nvlink_bandwidth),
        network_bandwidth=overridden(machine.network_gb_per_s, named.network_bandwidth),
    )


CGROUP = Path("/sys/fs/cgroup")


def total_memory() -> int:
    """Return the total memory in bytes that processes can use here, regardless of what is in use."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = (CGROUP / "memory.max").read_text(encoding="utf-8").strip()
    except OSError:  # not in a container, or the limit is not readable
        return physical
    return min(physical, int(limit)) if limit.isdecimal() else physical


def available_memory() -> int:
    """Return the bytes that are free on this machine and in this container."""
    left = [1 << 62]
    for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("MemAvailable:"):
            left.append(int(line.split()[1]) * 1024)
    limit, used = CGROUP / "memory.max", CGROUP / "memory.current"
    if limit.exists() and limit.read_text(encoding="utf-8").strip() != "max":
        cached = re.findall(
            r"^(?:in)?active_file (\d+)$", (CGROUP / "memory.stat").read_text(encoding="utf-8"), re.MULTILINE
        )
        left.append(
            int(limit.read_text(encoding="utf-8")) - int(used.read_text(encoding="utf-8")) + sum(map(int, cached))
        )  # page caches can be dropped
    return min(left)
