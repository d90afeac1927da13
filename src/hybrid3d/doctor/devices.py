"""GPUs: drivers and CUDA against torch's build, clocks, ECC, persistence mode, NVLink and NCCL."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from hybrid3d.doctor.finding import CANNOT_START, SLOW, Context, Finding
from hybrid3d.doctor.gpu.machine import nvidia_smi
from hybrid3d.planning.hardware import hardware_of

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
ABSENT = re.compile(r"\[?(N/A|Not Supported|Unknown Error)\]?", re.IGNORECASE)


def check_gpus(context: Context) -> Iterator[Finding]:
    """Report the GPUs that the driver has and torch sees, and what slows them down."""
    output = nvidia_smi([f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"])
    rows = [dict(zip(FIELDS, map(str.strip, line.split(",")), strict=False)) for line in output.splitlines() if line]
    rows = [row for row in rows if row["index"].isdecimal()]
    yield from _check_torch(context, rows)
    for row in rows:
        yield from _check_gpu(row)
    if len(rows) > 1:
        yield from _check_nvlink(len(rows))


def _check_torch(context: Context, rows: Sequence[dict[str, str]]) -> Iterator[Finding]:
    """Compare what torch sees with what the driver has."""
    machine = context.answer("machine")
    if machine is None:
        error = context.answers.get("machine", {}).get("error", "it was not asked")
        yield Finding(f"torch cannot be used: {error}", CANNOT_START, "install it anew, as requirements/ has it")
        return
    seen, built_for = machine["gpus"], machine["versions"].get("cuda", "None")
    driver = rows[0]["driver_version"] if rows else machine["versions"].get("driver", "unknown")
    if seen:
        names = ", ".join(dict.fromkeys(gpu["name"] for gpu in seen))
        nccl = context.answer("nccl") or "unknown"
        yield Finding(f"{len(seen)} GPUs ({names}), driver {driver}, torch for CUDA {built_for}, NCCL {nccl}")
        yield from _check_memory(context, min(gpu["bytes"] for gpu in seen))
        return
    if not rows:
        yield Finding("no GPU: models are trained and answers generated on the CPU, over gloo")
        return
    there = f"the driver {driver} has {len(rows)} GPUs, but torch sees none"
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
    """Report what is not as it should be with one GPU."""
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
    links = re.findall(r"Link \d+: ([\d.]+) GB/s", nvidia_smi(["nvlink", "--status"]))
    if links:
        rate = sum(map(float, links)) / gpus
        yield Finding(f"NVLink: {len(links) // gpus} links of a GPU, {rate:.0f} GB/s together")
    else:
        found = f"no NVLink between the {gpus} GPUs: tensor parallelism goes over PCIe"
        yield Finding(
            found, SLOW, "train.tp=1 with more train.pp or train.dp; nvidia-smi topo -m shows the connections"
        )
