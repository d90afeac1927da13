"""The process groups of a recipe: how fast they are here, against what `hybrid3d plan` assumes."""

from __future__ import annotations

import io
import json
import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from hybrid3d.config import Recipe, recipe_to_yaml
from hybrid3d.doctor import CANNOT_START, OK, SLOW, Context, Finding, Severity
from hybrid3d.launch_environment import CHECKED, RENDEZVOUS_SECONDS
from hybrid3d.planning.hardware import GB, hardware_of
from hybrid3d.run.ends import Ended
from hybrid3d.run.folder import RunFolder
from hybrid3d.run.terminal import plain_console

if TYPE_CHECKING:
    from hybrid3d.ledger import RankStart

TOLERANCE = 0.2  # by which what is measured may differ from what is assumed
SETTINGS = {"nvlink": "nvlink_gb_per_s", "network": "network_gb_per_s", "copies": "copies_gb_per_s"}
PLANNED = ("sync", "copies")  # what `plan` predicts with these numbers
STARTED_SECONDS = 60  # within which the ranks have started
GROUPS_SECONDS = 90.0  # within which all groups of a recipe are measured
GROUPS = "groups.json"  # in the run's folder: what was measured


def check_groups(context: Context) -> Iterator[Finding]:
    """Start the recipe's ranks, without engines, and measure each of their groups."""
    recipe = context.recipe
    if recipe is None:
        return
    if context.answer("machine") is None or context.answer("devices") != "":
        yield Finding("the recipe's process groups were not measured, because its ranks cannot be started here")
        return
    on_gpus = bool(context.answer("machine")["gpus"])
    with tempfile.TemporaryDirectory(prefix="hybrid3d-doctor-") as folder:
        measured, output = _run_ranks(recipe, Path(folder))
    if measured is None:
        fix = "findings about the network and limits may name the cause; NCCL_DEBUG=INFO and TORCH_CPP_LOG_LEVEL=INFO"
        yield Finding(f"the recipe's ranks could not form their groups: {output}", CANNOT_START, f"{fix} say more")
        return
    yield from describe(recipe, measured, on_gpus)


def _run_ranks(recipe: Recipe, folder: Path) -> tuple[list[dict[str, Any]] | None, str]:
    """Return what the ranks measured, or None and why they failed. Each is `hybrid3d doctor` under a launcher."""
    recipe = replace(recipe, run=replace(recipe.run, dir=str(folder))).without_reward_ranks()
    run, file = RunFolder.for_recipe(recipe), folder / "recipe.yaml"
    run.make_logs()
    file.write_text(recipe_to_yaml(recipe), encoding="utf-8")
    said = io.StringIO()
    quiet = {RENDEZVOUS_SECONDS: str(STARTED_SECONDS), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    with mock.patch.dict(os.environ, {CHECKED: "1", **{key: os.environ.get(key, quiet[key]) for key in quiet}}):
        from hybrid3d.launch.launcher import launch  # torch reads its level of logging when it is imported

        code = launch(["doctor", str(file)], recipe.world_size, run, plain_console(file=said))
    if code:
        lines = (line.strip() for line in said.getvalue().splitlines())
        return None, " ".join(line for line in lines if not line.startswith("its log:"))  # which is removed
    return json.loads((run.path / GROUPS).read_text(encoding="utf-8")), ""


def measure_groups(recipe: Recipe, folder: RunFolder, start: RankStart) -> None:
    """Measure bandwidth and latency of each process group of a recipe, and write them to the folder.

    The process fails if it takes longer than `GROUPS_SECONDS`.
    """

    rank = start.rank

    def give_up() -> None:
        Ended(rank, f"the process groups were not measured within {GROUPS_SECONDS:g} s").write(folder)
        os._exit(1)

    limit = threading.Timer(GROUPS_SECONDS, give_up)
    limit.daemon = True
    limit.start()
    from hybrid3d.bench.groups import measure
    from hybrid3d.bench.start import start_groups

    groups = start_groups(recipe, start.store)

    measured = measure(recipe, groups)
    limit.cancel()
    if rank == 0:
        (folder.path / GROUPS).write_text(json.dumps([asdict(one) for one in measured]), encoding="utf-8")


def describe(recipe: Recipe, measured: Sequence[dict[str, Any]], on_gpus: bool) -> Iterator[Finding]:
    """Compare measurements with the recipe's machine: those of the sync and of copies are what `plan` is about.

    Args:
        measured: the fields of `bench.groups.GroupMeasurement`.
        on_gpus: whether the ranks have GPUs, whose collectives should reach the links' rates, too.
    """
    hardware = hardware_of(recipe.machine)
    assumed = {
        "nvlink": hardware.nvlink_bandwidth,
        "network": hardware.network_bandwidth,
        "copies": hardware.memory_bandwidth,
    }
    for one in measured:
        link, bandwidth = one["link"], one["bandwidth"]
        ratio, setting = bandwidth / assumed[link], f"machine.{SETTINGS[link]}"
        where = "copies of one rank" if one["name"] == "copies" else f"{one['name']}, {one['ranks']} ranks"
        found = (
            f"{where}, {one['operation']}: {_rate(bandwidth)} measured, {_rate(assumed[link])} assumed ({setting}), "
            f"{100 * ratio:.3g} %; {one['latency'] * 1e6:.0f} us for a few bytes"
        )
        severity: Severity = OK
        fix = ""
        if one["name"] in PLANNED and not 1 / (1 + TOLERANCE) <= ratio <= 1 + TOLERANCE:
            severity, fix = (SLOW if ratio < 1 else OK), f"{setting}={bandwidth / GB:.3g}"
        elif on_gpus and ratio < 0.5:
            severity = SLOW
            fix = "nvidia-smi topo -m shows the connections, NCCL_DEBUG=INFO which of them NCCL uses"
        numbers = {"measured": bandwidth, "assumed": assumed[link], "latency": one["latency"]}
        yield Finding(found, severity, fix, numbers)


def _rate(bandwidth: float) -> str:
    return f"{bandwidth / GB:,.{0 if bandwidth >= 100 * GB else 3}f} GB/s"
