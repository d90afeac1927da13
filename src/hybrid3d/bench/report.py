"""Formats the measurements of a benchmark as JSON, as a Markdown table and as a picture."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from hybrid3d.config import Recipe
from hybrid3d.run.folder import RunFolder

METHODS = {
    "hybrid3d": "hybrid3d",
    "delta": "hybrid3d, the changed elements only",
    "gather": "gather: PP broadcast, TP and EP all-gather, slice",
    "wire": "wire of hybrid3d's bytes, and one copy of what stays",
    "gather_wire": "wire of gather's bytes",
}
"""All methods with their names; those of changed elements are measured with `--changed` only."""
COLUMNS = (
    "",
    "seconds: median (min to max)",
    "bytes received, all ranks",
    "operations, all ranks",
    "memory besides weights, a rank",
    "bit-exact",
)
COLORS = {"hybrid3d": "C0", "delta": "C0", "gather": "C1"}


def summarize(recipe: Recipe, scaled: str, measured: dict[str, Any], changed: float | None) -> dict[str, Any]:
    """Return what `hybrid3d bench --json` prints: the measurements, ratios, the machine and the date."""
    seconds = measured["seconds"]
    assert recipe.rollout is not None, "scale_recipe refuses a recipe without it"
    return {
        "name": recipe.name,
        "ranks": recipe.world_size,
        "generation_ranks": recipe.generation_ranks,
        "scaled": scaled,
        "layout": {"train": asdict(recipe.train), "rollout": asdict(recipe.rollout)},
        "coverage": "exact" if all(measured["bit_exact"].values()) else "wrong",
        **({} if changed is None else {"changed_fraction": changed}),
        **measured,
        "ratios": {
            "verification": (seconds["verified"] - seconds["hybrid3d"]) / seconds["sync"],
            "of_wire": seconds["wire"] / seconds["hybrid3d"],
            **(_gather_ratios(measured) if "gather" in seconds else {}),
            **({} if changed is None else _delta_ratios(measured)),
        },
        "memory": _memory(measured),
        "machine": describe_machine(),
        "date": datetime.now(UTC).date().isoformat(),
    }


def _gather_ratios(measured: dict[str, Any]) -> dict[str, float | None]:
    seconds, received = measured["seconds"], measured["received_bytes"]
    return {
        "bytes_gather": measured["gather_bytes"] / received if received else None,
        "seconds_gather": seconds["gather"] / seconds["hybrid3d"],
        "gather_of_wire": seconds["gather_wire"] / seconds["gather"],
    }


def _delta_ratios(measured: dict[str, Any]) -> dict[str, float | None]:
    seconds, sent = measured["seconds"], measured["delta_bytes"]
    return {
        "bytes_delta": measured["received_bytes"] / sent if sent else None,
        "of_delta_bound": sent / measured["delta_bound_bytes"] if measured["delta_bound_bytes"] else None,
        "seconds_delta": seconds["hybrid3d"] / seconds["delta"],
    }


def _memory(measured: dict[str, Any]) -> dict[str, int]:
    """Return the memory that a method takes besides the weights, on the fullest rank."""
    buffers = {name: measured[key] for name in measured["seconds"] if (key := f"max_{name}_buffer_bytes") in measured}
    buffers["hybrid3d"] = measured["max_staging_bytes"] + measured["max_lent_bytes"]
    if "delta" in measured["seconds"]:
        buffers["delta"] = measured["max_delta_staging_bytes"] + measured["max_bitmap_bytes"]
    return {method: nbytes + measured["max_finalize_bytes"] for method, nbytes in buffers.items()}


def describe_machine() -> str:
    """Describe the hardware of this machine."""
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    return f"{os.cpu_count()} CPU cores ({platform.machine()})"


def format_table(found: dict[str, Any], methods: Mapping[str, str] = METHODS) -> str:
    """Return the measurements as a Markdown table, a row for each of `methods` that was measured, with text below."""
    ratios, layout = found["ratios"], found["layout"]
    rows = [
        f"{found['name']}: {found['ranks']} ranks; {_sides(layout)}{_split(found)}; scaled: {found['scaled']}; "
        f"{found['machine']}, {found['date']}",
        "",
        f"| {' | '.join(COLUMNS)} |",
        f"|{'---|' * len(COLUMNS)}",
    ]
    for key, name in methods.items():
        if key not in found["seconds"]:
            continue
        low, high = found["spread"][key]
        memory = f"{found['memory'][key] / 2**20:.1f} MiB" if key in found["memory"] else ""
        exact = {True: "yes", False: "NO"}.get(found["bit_exact"].get(key), "")
        count = found.get("operations" if key == "hybrid3d" else f"{key}_operations", "")
        rows.append(
            f"| {name} | {found['seconds'][key]:.3f} ({low:.3f} to {high:.3f}) | {_received(found, key):,} | {count} "
            f"| {memory} | {exact} |"
        )
    seconds = found["seconds"]
    said = [
        f"Received: the lower bound is {found['lower_bound_bytes']:,}.",
        *_wire_lines(ratios),
        f"vLLM's finalization, common to all: {seconds['finalize']:.3f} s; a whole sync: {seconds['sync']:.3f} s.",
        f"Verified by checksums at both ends: {seconds['verified']:.3f} s instead of {seconds['hybrid3d']:.3f} s, "
        f"which is {100 * ratios['verification']:.0f} % of a whole sync.",
    ]
    said += _delta_lines(found) if "delta" in seconds else []
    names = {"hybrid3d": "hybrid3d's row", "delta": "its changed elements' row", "sync": "a whole sync"}
    names |= {"delta_sync": "a whole sync of changed elements"}
    where = [
        f"Where the time of {what} goes, on a mean rank: "
        + ", ".join(f"{phase} {seconds:.3f}" for phase, seconds in found["phases"][key].items())
        + "."
        for key, what in names.items()
        if key in found["phases"]
    ]
    return "\n".join([*rows, "", *said, *where])


def _received(found: dict[str, Any], method: str) -> int:
    name = {"hybrid3d": "received", "gather_wire": "gather"}.get(method, method)
    return int(found[f"{name}_bytes"])


def _split(found: dict[str, Any]) -> str:
    other = found["generation_ranks"]
    return f", {found['ranks'] - other} that train and {other} that generate" if other < found["ranks"] else ""


def _wire_lines(ratios: dict[str, Any]) -> list[str]:
    of_wire = f"hybrid3d reaches {ratios['of_wire']:.2f} of its wire"
    if "seconds_gather" not in ratios:
        return [f"{of_wire}."]
    return [
        f"gather / hybrid3d: {_times(ratios['bytes_gather'])} of bytes, {ratios['seconds_gather']:.2f} of seconds.",
        f"{of_wire}, gather {ratios['gather_of_wire']:.2f} of its own.",
    ]


def _delta_lines(found: dict[str, Any]) -> list[str]:
    ratios, seconds = found["ratios"], found["seconds"]
    sparse = 100 * found["sparse_bytes"] / found["wanted_bytes"]
    return [
        f"Changed: {100 * found['changed_fraction']:.3g} % of the elements. Of {sparse:.1f} % of what vLLM wants, only "
        f"changed elements are sent; their entropy is {found['delta_bound_bytes']:,.0f} bytes.",
        f"hybrid3d / its changed elements: {_times(ratios['bytes_delta'])} of bytes, {ratios['seconds_delta']:.2f} of "
        "seconds.",
        f"A whole sync of changed elements: {seconds['delta_sync']:.3f} s instead of {seconds['sync']:.3f} s.",
    ]


def _times(ratio: float | None) -> str:
    return "all" if ratio is None else f"{ratio:.2f}"


def _sides(layout: dict[str, Any]) -> str:
    train, rollout = layout["train"], layout["rollout"]
    said = [f"{key}{train[key]}" for key in ("tp", "pp", "vpp", "ep", "etp", "cp", "dp") if train[key] not in (1, None)]
    experts = " expert-parallel" if rollout["expert_parallel"] else ""
    return f"{' '.join(said).upper() or 'TP1'} -> TP{rollout['tp']}{experts}"


def write_results(folder: RunFolder, found: dict[str, Any]) -> None:
    """Write `bench.json`, `bench.md` and `bench.png` into the folder."""
    (folder.path / "bench.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    (folder.path / "bench.md").write_text(format_table(found) + "\n", encoding="utf-8")
    draw(found, folder.path / "bench.png")


def draw(found: dict[str, Any], path: Path) -> None:
    """Draw the seconds and bytes of each method."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3), layout="tight")
    axes = figure.subplots(1, 2)
    keys = [key for key in METHODS if key in found["seconds"]]
    medians = [found["seconds"][key] for key in keys]
    spread = [[median - found["spread"][key][0] for key, median in zip(keys, medians, strict=True)]]
    spread += [[found["spread"][key][1] - median for key, median in zip(keys, medians, strict=True)]]
    axes[0].barh(keys, medians, xerr=spread, color=[COLORS.get(key, "C7") for key in keys])
    axes[0].set_xlabel("seconds: median, fastest and slowest")
    axes[1].barh(keys, [_received(found, key) / 1e9 for key in keys], color=[COLORS.get(key, "C7") for key in keys])
    axes[1].axvline(found["lower_bound_bytes"] / 1e9, linestyle="--", color="black", label="lower bound")
    axes[1].set_xlabel("GB received, all ranks")
    axes[1].legend(fontsize=8)
    for axis in axes:
        axis.invert_yaxis()
    figure.suptitle(f"{found['name']}: {found['ranks']} ranks on {found['machine']}", fontsize=10)
    figure.savefig(path, dpi=110)
