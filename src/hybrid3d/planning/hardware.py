"""Memory and bandwidths of GPUs: the named machines, and the numbers of a recipe that replace theirs.

`total_memory` is the memory of this machine, or of this container.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

from hybrid3d.config import Machine

GB = 10**9
TERA = 10**12


@dataclass(frozen=True)
class Hardware:
    """Memory and speeds of one GPU. Bandwidths are in bytes per second; those of links hold for each direction.

    Attributes:
        memory_bytes: as torch reports it, of which vLLM takes its fraction: a GPU of 80 GiB has 85 GB.
        memory_bandwidth: of its own memory; a copy reads and writes each byte.
        nvlink_bandwidth: to all other GPUs of its node together.
        network_bandwidth: to other nodes.
        bf16_flops, fp8_flops: of dense matrices, per second; 0 where it has none in FP8.
        launch_seconds: in which the host starts an operation of torch: assumed.
        wait_seconds: in which the host waits for a result that is ready, and starts again: assumed.
        serial: whether one processor copies and sends, in turns.
        host_bytes: memory of a node of eight GPUs: 2 TB in the data sheets of NVIDIA's DGX A100 640GB, H100 and H200.
    """

    memory_bytes: float
    memory_bandwidth: float
    nvlink_bandwidth: float
    network_bandwidth: float
    bf16_flops: float = 0.0
    fp8_flops: float = 0.0
    launch_seconds: float = 5e-6
    wait_seconds: float = 20e-6
    serial: bool = False
    host_bytes: float = 2000 * GB


def _link_rate(links: int, gb_per_s: float) -> float:
    """Return the bandwidth of the links of a GPU to all others together, of so many GB/s each in one direction."""
    return links * gb_per_s * GB


def _adapter_rate(gb_per_s: float) -> float:
    """Return the bandwidth of a network adapter that is sold by Gb/s."""
    return gb_per_s * GB / 8


_A100 = Hardware(85 * GB, 2039 * GB, _link_rate(12, 25), _adapter_rate(200), 312 * TERA)
_H100 = Hardware(85 * GB, 3350 * GB, _link_rate(18, 25), _adapter_rate(400), 989.5 * TERA, 1979 * TERA)
_H200 = Hardware(150 * GB, 4800 * GB, _link_rate(18, 25), _adapter_rate(400), 989.5 * TERA, 1979 * TERA)

MACHINES = {
    "a100-8x200g": _A100,
    "h100-8x400g": _H100,
    "h200-8x400g": _H200,
    "a100": _A100,
    "h100": _H100,
    "h200": _H200,
    "b200": Hardware(180 * GB, 8000 * GB, _link_rate(18, 50), _adapter_rate(400), 2250 * TERA, 4500 * TERA),
    "gb200": Hardware(186 * GB, 8000 * GB, _link_rate(18, 50), _adapter_rate(400), 2500 * TERA, 5000 * TERA),
    "mi300x": Hardware(192 * GB, 5300 * GB, _link_rate(7, 64), _adapter_rate(400), 1307.4 * TERA, 2614.9 * TERA),
}
"""What `machine.kind` names. The sources of each number are in `docs/planning.md`.

Rates of matrices are without sparsity. The memory of H100 and H200 is that which torch reports
(`benchmarks/results/gpu-check-h100.json`, `gpu-check-h200.json`), and of an A100 assumed to be that of an H100; that of
the others is what data sheets say.
"""

# A core of a CPU, for the choice between syncs: memory as in the copies of benchmarks/results/reshard-cpu.md, gloo over
# the loopback device as in its wire, and 10 Gb/s Ethernet. No operation has to be waited for.
CPU = Hardware(0.0, 10 * GB, 1.5 * GB, 1.25 * GB, launch_seconds=2e-6, wait_seconds=0.0, serial=True)


def hardware_of(machine: Machine) -> Hardware:
    """Return the machine that a recipe names, with the numbers that the recipe sets itself."""
    named = MACHINES[machine.kind]

    def overridden(value: float | None, default: float) -> float:
        return default if value is None else value * GB

    return replace(
        named,
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
