"""Memory and bandwidths of GPUs: the named machines, and the numbers of a recipe that replace theirs.

`total_memory` is the memory of this machine, or of this container. `Reserve` is what neither tensors nor vLLM's cache
take of a GPU's memory. Where its figures come from:

- contexts: in `benchmarks/results/gpu-check-h100.md` an H100 of 85.0 GB (79.2 GiB) was full after 78 GiB of tensors of
  a process in which torch and Megatron had run. What else it had is at most 1.3 GB. vLLM's kernels are assumed to add
  0.5 GB; that was not measured;
- communicators: assumed, as several ranks have not been run on GPUs: 0.25 GB for the buffers of NCCL's channels to the
  neighbours in rings and trees. What is counted is their number, which `tests/planning/test_process_groups.py` compares
  with runs;
- graphs: assumed: 1 GB for the graphs that vLLM captures. They are not freed while vLLM sleeps.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hybrid3d.config import Machine, Recipe

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
    own: dict[str, Any] = {
        "memory_bytes": machine.memory_gb,
        "memory_bandwidth": machine.copies_gb_per_s,
        "nvlink_bandwidth": machine.nvlink_gb_per_s,
        "network_bandwidth": machine.network_gb_per_s,
    }
    return replace(MACHINES[machine.kind], **{key: gb * GB for key, gb in own.items() if gb is not None})


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
    meminfo = Path("/proc/meminfo").read_text(encoding="utf-8")
    left = [int(kib) * 1024 for kib in re.findall(r"^MemAvailable: *(\d+)", meminfo, re.MULTILINE)]
    limit = CGROUP / "memory.max"
    if limit.exists() and (most := limit.read_text(encoding="utf-8").strip()) != "max":
        used, stat = ((CGROUP / name).read_text(encoding="utf-8") for name in ("memory.current", "memory.stat"))
        cached = re.findall(r"^(?:in)?active_file (\d+)$", stat, re.MULTILINE)  # page caches can be dropped
        left.append(int(most) - int(used) + sum(map(int, cached)))
    return min(left, default=1 << 62)


TRAINING_CONTEXT, ROLLOUT_CONTEXT = 1_300_000_000, 500_000_000
COMMUNICATOR = 250_000_000
GRAPHS = 1_000_000_000


@dataclass(frozen=True)
class Reserve:
    """Bytes of a GPU that are taken all the time.

    Attributes:
        contexts: the driver's context of a process, with the code that is loaded into it.
        training_communicators: NCCL's of Megatron's groups and of syncs.
        rollout_communicators: NCCL's of vLLM, which it counts in its fraction of the memory.
        graphs: vLLM's CUDA graphs, which it counts in its fraction, too.
    """

    contexts: int = 0
    training_communicators: int = 0
    rollout_communicators: int = 0
    graphs: int = 0

    @property
    def of_rollout(self) -> int:
        """Bytes within vLLM's fraction that it has while it sleeps, too."""
        return self.rollout_communicators + self.graphs

    @property
    def of_training(self) -> int:
        """Bytes beside vLLM's fraction."""
        return self.contexts + self.training_communicators

    @property
    def total(self) -> int:
        return self.of_rollout + self.of_training


def reserve_of(recipe: Recipe, has_experts: bool) -> Reserve:
    """Return what a rank that trains and generates takes; where ranks do one of both, each has less."""
    return Reserve(
        contexts=TRAINING_CONTEXT + ROLLOUT_CONTEXT,
        training_communicators=COMMUNICATOR * count_training_groups(recipe, has_experts),
        rollout_communicators=COMMUNICATOR * count_rollout_groups(recipe),
        graphs=GRAPHS,
    )


def count_training_groups(recipe: Recipe, has_experts: bool) -> int:
    """Return the number of groups of several ranks over which a rank trains and syncs (`train.runtime.use_groups`)."""
    train, ranks = recipe.train, recipe.train_ranks
    of_stage, sharing = ranks // train.pp, train.ep * train.etp
    sizes = [train.tp, train.pp, train.cp, train.dp * train.cp, train.pp, ranks]  # that of embeddings has ends of pp
    if has_experts:
        sizes += [train.ep, train.etp, sharing, of_stage // sharing]
    neighbours = 2 if train.vpp > 1 else 0  # messages apart from others have communicators of two ranks
    weights = int(recipe.sync_ranks > 1)
    return sum(size > 1 for size in sizes) + neighbours + weights


def count_rollout_groups(recipe: Recipe) -> int:
    """Return the number of groups of several ranks over which vLLM computes."""
    rollout = recipe.rollout
    assert rollout is not None, "checked when the recipe was read"
    return (rollout.tp > 1) + (rollout.dp > 1) + (rollout.expert_parallel and rollout.tp * rollout.dp > 1)
