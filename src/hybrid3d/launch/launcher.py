"""Starts the ranks of a run on this machine, as `torchrun` does, and reports in one message why they failed."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import uuid
from collections.abc import Mapping
from typing import Any

import torch
from rich.console import Console
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from hybrid3d.config import Recipe, RecipeError
from hybrid3d.launch.machine_memory import total_memory
from hybrid3d.launch.worker import failure_message
from hybrid3d.launch_environment import RUN, local_world_size
from hybrid3d.process import kill_descendants_on_exit, shared_memory_cleanup
from hybrid3d.run.run_folder import RunFolder

RANK_PROCESS_BYTES = 450_000_000  # of its own that a rank has once both engines are imported: measured 465 MiB on a CPU
MAX_RANKS_PER_CORE = 32


def launch(arguments: list[str], world_size: int, folder: RunFolder, console: Console) -> int:
    """Run `hybrid3d ARGUMENTS` as `world_size` ranks on this machine; 0, or 1 when one of them failed.

    A rank that ran out of memory has made its run smaller: then they are started again.
    """
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # its report is ours to make
    logging.getLogger("torch.distributed.run").setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // world_size)))
    while True:
        try:
            failures = _run_once(arguments, world_size, folder)
        except SignalException as interrupted:
            console.print(f"stopped by {interrupted.sigval.name}", style="red", highlight=False)
            return 1
        if not failures:
            return 0
        cause = find_root_cause(folder, failures)
        again = cause["kind"] == "out_of_memory"
        style = "yellow" if again else "red"
        console.print(
            failure_message(folder, cause["rank"], cause), style=style, highlight=False, markup=False, soft_wrap=True
        )
        if not again:
            return 1


def _run_once(arguments: list[str], world_size: int, folder: RunFolder) -> dict[int, Any]:
    """What the launcher saw of each rank that ended badly: `exitcode`, negative for a signal."""
    ident = f"hybrid3d-{uuid.uuid4().hex[:12]}"
    os.environ[RUN] = ident
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=world_size,
        run_id=ident,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        max_restarts=0,
    )
    for old in folder.logs.glob("rank-*.failure"):
        old.unlink()
    try:
        with shared_memory_cleanup(ident), kill_descendants_on_exit():  # where ranks were killed
            elastic_launch(config, sys.executable)("-m", "hybrid3d", *arguments)
        return {}
    except ChildFailedError as error:
        return dict(error.failures)


def check_devices(recipe: Recipe, generates: bool = True) -> None:
    """A launch on this machine alone needs a GPU for every rank, where there are GPUs at all; else memory and cores.

    Args:
        generates: whether vLLM is started, which takes memory for its cache.

    Raises:
        RecipeError: it has fewer than the recipe's ranks need.
    """
    gpus, ranks_said = torch.cuda.device_count(), f"train.tp x pp x cp x dp = {recipe.world_size} ranks"
    elsewhere = "start it with torchrun or srun on several"
    if gpus and recipe.world_size > gpus:
        raise RecipeError(recipe.name, [f"{ranks_said} exceed this machine's {gpus} GPUs: {elsewhere}"])
    if gpus:
        return
    cache = recipe.rollout.kv_cache_gib * 2**30 if recipe.rollout is not None and generates else 0
    each, memory, cores = RANK_PROCESS_BYTES + cache, total_memory(), os.cpu_count() or 1
    most = min(int(memory // each), MAX_RANKS_PER_CORE * cores)
    if recipe.world_size > most:
        of = f", {cache / 1e9:.1f} GB of it as rollout.kv_cache_gib says" if cache else ""
        has = f"{memory / 1e9:.1f} GB of memory and {cores} cores"
        takes = f"a rank takes {each / 1e9:.1f} GB at least{of}, and a core {MAX_RANKS_PER_CORE} ranks"
        problem = f"{ranks_said} exceed the {most} that this machine can start with {has}: {takes}"
        raise RecipeError(recipe.name, [f"{problem}: lower train.dp, or {elsewhere}"])


def check_node(recipe: Recipe) -> None:
    """Under torchrun or srun: each of this node's ranks needs a GPU, where there are GPUs at all.

    And as many must be here as the recipe is made for: which ranks share a node decides what crosses the network.
    """
    gpus, here = torch.cuda.device_count(), local_world_size()
    where = f"{here} ranks were started on {socket.gethostname()}"
    planned = recipe.machine.gpus_per_node
    if 0 < gpus < here:
        problem = f"{where}, which shows them {gpus} GPUs: start {gpus} a node, or let each see all of the node's GPUs"
        raise RecipeError(
            recipe.name, [f"{problem} (srun: --gpus-per-node={here}, neither --gpus-per-task nor --gpu-bind)"]
        )
    if gpus and here not in {min(planned, recipe.world_size), recipe.world_size % planned}:
        problem = f"{where}, and the recipe is made for {planned} a node"
        raise RecipeError(recipe.name, [f"{problem}: start as many, or set machine.gpus_per_node={here}"])


def find_root_cause(folder: RunFolder, failures: Mapping[int, Any]) -> dict[str, Any]:
    """A rank's own error before a lost peer's, and a rank that was killed before both: `rank`, `reason`, `kind`.

    Args:
        failures: what the launcher saw of each rank that ended badly: `exitcode`, negative for a signal.
    """
    reasons = [json.loads(path.read_text()) for path in sorted(folder.logs.glob("rank-*.failure"))]
    own = sorted((r for r in reasons if not r["peer"]), key=lambda r: r["time"])
    killed = {rank: -f.exitcode for rank, f in failures.items() if f.exitcode < 0 and -f.exitcode != signal.SIGTERM}
    if own:
        return own[0]
    if killed:
        rank, number = next(iter(killed.items()))
        return {"rank": rank, "reason": f"killed by {signal.Signals(number).name}", "kind": "error"}
    if reasons:
        return min(reasons, key=lambda r: r["time"])
    rank, failure = next(iter(failures.items()))
    return {"rank": rank, "reason": f"ended with exit code {failure.exitcode}", "kind": "error"}
