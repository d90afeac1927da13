"""The resources of a machine: shared memory, limits, cores, memory and GPUs.

Of GPUs: drivers and CUDA against torch's build, clocks, ECC, persistence mode, NVLink and NCCL.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from hybrid3d.doctor import CANNOT_START, SLOW, Context, Finding
from hybrid3d.planning.hardware import CGROUP, available_memory, hardware_of
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


SLOWDOWNS = {
    "hw_thermal_slowdown": "it is too hot: look at its cooling",
    "sw_thermal_slowdown": "it is too hot: look at its cooling",
    "hw_power_brake_slowdown": "the power supply holds it back: look at the machine's power supplies",
    "sw_power_cap": "its power limit holds it back: nvidia-smi -pl WATTS (as root) raises it",
}
FIELDS = (
    *("index", "name", "driver_version", "persistence_mode", "memory.total"),
    *("ecc.errors.uncorrected.volatile.total", "clocks_throttle_reasons.hw_slowdown"),
    *(f"clocks_throttle_reasons.{name}" for name in SLOWDOWNS),
)
NVIDIA_SMI_SECONDS = 30.0  # without persistence mode it takes seconds
ABSENT = re.compile(r"\[?(N/A|Not Supported|Unknown Error)\]?", re.IGNORECASE)


def check_gpus(context: Context) -> Iterator[Finding]:
    """Report the GPUs that the driver has and torch sees, and what slows them down."""
    output = _nvidia_smi([f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"])
    rows = [dict(zip(FIELDS, map(str.strip, line.split(",")), strict=False)) for line in output.splitlines() if line]
    rows = [row for row in rows if row["index"].isdecimal()]
    yield from _check_torch(context, rows)
    for row in rows:
        yield from _check_gpu(row)
    if len(rows) > 1:
        yield from _check_nvlink(len(rows))


def _nvidia_smi(arguments: Sequence[str]) -> str:
    """Return the output of nvidia-smi; empty if there is none, or if it fails."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments],
            capture_output=True,
            text=True,
            timeout=NVIDIA_SMI_SECONDS,
            encoding="utf-8",
            errors="replace",
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def driver_version() -> str:
    """Return the version of the driver of NVIDIA's GPUs, where nvidia-smi tells it."""
    found = re.search(r"[\d.]+", _nvidia_smi(["--query-gpu=driver_version", "--format=csv,noheader"]))
    return found[0] if found else "unknown"


def _check_torch(context: Context, rows: Sequence[dict[str, str]]) -> Iterator[Finding]:
    machine = context.answer("machine")
    if machine is None:
        error = context.answers.get("machine", {}).get("error", "it was not asked")
        yield Finding(f"torch cannot be used: {error}", CANNOT_START, "install it anew, as requirements/ has it")
        return
    seen, built_for = machine["gpus"], machine["cuda"]
    if seen:
        driver = rows[0]["driver_version"] if rows else driver_version()
        names = ", ".join(dict.fromkeys(gpu["name"] for gpu in seen))
        nccl = context.answer("nccl") or "unknown"
        found = f"{len(seen)} GPUs ({names}), driver {driver}, torch for CUDA {built_for}, NCCL {nccl}"
        yield Finding(f"{found}; in the source tree, `make gpu-check` checks what they compute")
        yield from _check_memory(context, min(gpu["bytes"] for gpu in seen))
        if not rows:
            unknown = "ECC errors, clocks, persistence mode and NVLink are not checked"
            found = f"nvidia-smi does not tell of the GPUs: {unknown}"
            yield Finding(found, SLOW, f"nvidia-smi --query-gpu={','.join(FIELDS)} --format=csv says why")
        return
    if not rows:
        yield Finding("no GPU: models are trained and answers generated on the CPU, over gloo")
        return
    there = f"the driver {rows[0]['driver_version']} has {len(rows)} GPUs, but torch sees none"
    hidden = context.environment.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and (not hidden.strip() or hidden.strip() == "-1"):
        yield Finding(f"{there}: CUDA_VISIBLE_DEVICES={hidden!r} hides them", SLOW, "unset CUDA_VISIBLE_DEVICES")
    elif built_for == "None":
        yield Finding(f"{there}: this build of torch is for CPUs", CANNOT_START, "install the extra gpu: docs/gpu.md")
    else:
        why = machine["cuda_error"] or f"torch is built for CUDA {built_for}"
        fix = f"install a driver for CUDA {built_for}, or a torch that is built for this driver's CUDA"
        yield Finding(f"{there}: {why}", CANNOT_START, fix)


def _check_memory(context: Context, smallest: int) -> Iterator[Finding]:
    """Compare the memory of a GPU with what `plan` assumes."""
    if context.recipe is None:
        return
    assumed = hardware_of(context.recipe.machine).memory_bytes
    if smallest < 0.95 * assumed:
        found = f"a GPU has {smallest / 1e9:.1f} GB of memory, and the recipe plans with {assumed / 1e9:.1f} GB"
        yield Finding(found, SLOW, f"machine.memory_gb={smallest / 1e9:.0f}")


def _check_gpu(row: dict[str, str]) -> Iterator[Finding]:
    gpu = f"GPU {row['index']}"
    errors = row["ecc.errors.uncorrected.volatile.total"]
    if errors.isdecimal() and int(errors):
        fix = f"nvidia-smi -r -i {row['index']} (as root, with nothing running); exchange it if they come back"
        yield Finding(f"{gpu} has had {errors} ECC errors that were not corrected", CANNOT_START, fix)
    if row["persistence_mode"] == "Disabled":
        found = f"{gpu}: persistence mode is off, so each start waits for the driver to load"
        yield Finding(found, SLOW, "nvidia-smi -pm 1 (as root)")
    active = [name for name in SLOWDOWNS if row[f"clocks_throttle_reasons.{name}"] == "Active"]
    for name in active:
        yield Finding(f"{gpu}: its clocks are throttled ({name})", SLOW, SLOWDOWNS[name])
    if not active and row["clocks_throttle_reasons.hw_slowdown"] == "Active":
        yield Finding(f"{gpu}: its clocks are throttled (hw_slowdown)", SLOW, "nvidia-smi -q -d PERFORMANCE says more")
    unknown = [name for name, value in row.items() if ABSENT.fullmatch(value)]
    if unknown:
        yield Finding(f"{gpu}: nvidia-smi does not tell {', '.join(unknown)}")


def _check_nvlink(gpus: int) -> Iterator[Finding]:
    links = re.findall(r"Link \d+: ([\d.]+) GB/s", _nvidia_smi(["nvlink", "--status"]))
    if links:
        rate = sum(map(float, links)) / gpus
        yield Finding(f"NVLink: {len(links) // gpus} links of a GPU, {rate:.0f} GB/s together")
    else:
        found = f"no NVLink between the {gpus} GPUs: tensor parallelism goes over PCIe"
        yield Finding(
            found, SLOW, "train.tp=1 with more train.pp or train.dp; nvidia-smi topo -m shows the connections"
        )
