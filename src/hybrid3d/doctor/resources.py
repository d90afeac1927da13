"""What the machine gives to processes: shared memory, limits, cores and memory."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from hybrid3d.doctor.finding import CANNOT_START, SLOW, Context, Finding
from hybrid3d.planning.machine_memory import CGROUP, available_memory
from hybrid3d.process import SHARED_MEMORY

# The same numbers as in launch/prepare-node.sh, which says where they come from
SHARED_MIB_PER_RANK = 128
FILES, FILES_PER_RANK = 1024, 8
LEAST_FILES, LEAST_FILES_PER_RANK = 160, 20  # four ranks of the demo have 210 open, 73 of them sockets
THREADS_PER_RANK = 256  # of both engines, gloo and NCCL; they count as processes
INFINIBAND = Path("/sys/class/infiniband")
LIMITS_FILE = "/etc/security/limits.conf"


def check_shared_memory(context: Context) -> Iterator[Finding]:
    """Compare the free shared memory with what vLLM's queues and NCCL need."""
    if not SHARED_MEMORY.is_dir():
        yield Finding(f"there is no {SHARED_MEMORY}", CANNOT_START, f"mount -t tmpfs tmpfs {SHARED_MEMORY} (as root)")
        return
    space = shutil.disk_usage(SHARED_MEMORY)
    free, needed = space.free >> 20, SHARED_MIB_PER_RANK * context.ranks
    found = f"{SHARED_MEMORY} has {free:,} MiB free of {space.total >> 20:,}"
    if free >= needed:
        yield Finding(f"{found}; {_ranks_need(context.ranks)} {needed:,}")
        return
    total = needed + ((space.total - space.free) >> 20)
    fix = f"docker run --shm-size={total}m; without a container: mount -o remount,size={total}m {SHARED_MEMORY}"
    yield Finding(f"{found}, {_ranks_need(context.ranks)} {needed:,}", CANNOT_START, f"{fix} (as root)")


def check_limits(context: Context) -> Iterator[Finding]:
    """Check the limits of open files, of processes and, with InfiniBand, of locked memory."""
    yield from _check_files(context.ranks)
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    needed = THREADS_PER_RANK * context.ranks
    if os.geteuid() and soft != resource.RLIM_INFINITY and soft < needed:  # root has no limit
        found = f"ulimit -u (processes and threads) is {soft}, {_ranks_need(context.ranks)} {needed}"
        yield Finding(found, CANNOT_START, f"ulimit -u {needed}, or nproc in {LIMITS_FILE}")
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if INFINIBAND.is_dir() and any(INFINIBAND.iterdir()) and locked != resource.RLIM_INFINITY:
        found = f"ulimit -l (locked memory) is {locked >> 10} KiB, InfiniBand needs unlimited"
        yield Finding(found, CANNOT_START, f"docker run --ulimit memlock=-1; or memlock in {LIMITS_FILE}")


def _check_files(ranks: int) -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed, least = FILES + FILES_PER_RANK * ranks, LEAST_FILES + LEAST_FILES_PER_RANK * ranks
    found = f"ulimit -n (open files) is {soft}"
    if soft == resource.RLIM_INFINITY or soft >= needed:
        yield Finding(f"{found}; {_ranks_need(ranks)} {needed}")
        return
    if hard == resource.RLIM_INFINITY or hard >= needed:
        fix = f"ulimit -n {needed}"
    else:
        fix = f"docker run --ulimit nofile={needed}; or nofile in {LIMITS_FILE}: the hard limit is {hard}"
    if soft < least:
        yield Finding(f"{found}, but a rank opens up to {least} where there are {ranks}", CANNOT_START, fix)
    else:
        yield Finding(f"{found}; {_ranks_need(ranks)} {needed}, or a long run may end by it", SLOW, fix)


def _ranks_need(ranks: int) -> str:
    return "a rank needs" if ranks == 1 else f"{ranks} ranks need"


def check_cores(context: Context) -> Iterator[Finding]:
    """Compare the cores that this process may use with the number of ranks."""
    cores, usable = os.cpu_count() or 1, len(os.sched_getaffinity(0))
    nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1
    quota = _quota()
    found = f"{usable} of {cores} cores may be used, on {nodes} NUMA {'node' if nodes == 1 else 'nodes'}"
    if quota is not None and quota < usable:
        found += f", of which the container gets the time of {quota:g}"
        usable = max(1, int(quota))
    if context.ranks <= usable:
        yield Finding(found)
        return
    if usable < cores:
        fix = f"docker run --cpus={min(cores, context.ranks)}, srun --cpus-per-task, or taskset -c 0-{cores - 1}"
    else:
        fix = "fewer ranks, by train.dp, or a machine with more cores"
    yield Finding(f"{found}: {context.ranks} ranks take turns", SLOW, fix)


def _quota() -> float | None:
    """Return the number of cores whose time this container gets; None if there is no limit."""
    try:
        quota, period = (CGROUP / "cpu.max").read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else int(quota) / int(period)


def check_memory(context: Context) -> Iterator[Finding]:
    """Compare the free memory with what the ranks of the recipe need at least."""
    free, needs = available_memory(), context.answer("needs")
    found = f"{free / 1e9:.1f} GB of memory are free"
    if needs is None or (context.answer("machine") or {}).get("gpus"):
        yield Finding(found)
        return
    needed = needs["rank_bytes"] * context.ranks
    found += f"; {_ranks_need(context.ranks)} {needed / 1e9:.1f} GB at least"
    if needed <= free:
        yield Finding(found)
    else:
        yield Finding(found, CANNOT_START, "end other processes, or lower train.dp or rollout.kv_cache_gib")
