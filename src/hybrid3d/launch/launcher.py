"""Starts the ranks of a run on this machine, as `torchrun` does, and reports the cause of a failure in one message."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import uuid
from collections.abc import Callable, Mapping

import torch
from rich.console import Console

from hybrid3d.config import Recipe, RecipeError
from hybrid3d.launch.local_ranks import run_ranks
from hybrid3d.launch_environment import RUN, local_rank, local_world_size, rank
from hybrid3d.planning.hardware import total_memory
from hybrid3d.process import SHARED_MEMORY, kill_descendants_on_exit, shared_memory_cleanup
from hybrid3d.run.ends import find_root_cause
from hybrid3d.run.folder import RunFolder
from hybrid3d.run.terminal import print_error

RANK_PROCESS_BYTES = 450_000_000  # private memory of a rank with both engines imported: measured 465 MiB on a CPU
MAX_RANKS_PER_CORE = 32
LEAST_SHARED_MIB = 8  # a rank, with which none of the engines starts; `hybrid3d doctor` says how much they should have


def launch(
    arguments: list[str],
    world_size: int,
    folder: RunFolder,
    console: Console,
    max_restarts: int = 0,
    restarts: Mapping[int, int] | None = None,
) -> int:
    """Run `hybrid3d ARGUMENTS` as so many ranks on this machine, with restarts as for `supervise` and `run_ranks`.

    Returns:
        The exit code: 0, or 1 if a rank failed.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // world_size)))

    def run_once() -> Mapping[int, int]:
        os.environ[RUN] = run_id = new_run_id(folder)
        with shared_memory_cleanup(run_id), kill_descendants_on_exit():  # ranks that are killed do not clean up
            return run_ranks([sys.executable, "-m", "hybrid3d", *arguments], world_size, restarts)

    return supervise(run_once, folder, console, max_restarts)


def new_run_id(folder: RunFolder) -> str:
    """Return the id of one start of all ranks, after removing what failed ranks of the start before have left."""
    for old in folder.logs.glob("rank-*.failure"):
        old.unlink()
    return f"hybrid3d-{uuid.uuid4().hex[:12]}"


def supervise(run_once: Callable[[], Mapping[int, int]], folder: RunFolder, console: Console, max_restarts: int) -> int:
    """Run all ranks, again after each one that ran out of memory with smaller settings saved; print why they failed.

    Args:
        run_once: runs all ranks and returns the exit code of each that failed, negative for a signal.
        max_restarts: how often they are run again after any other failure of one of them, but not after what all of
            them agree on, as that rewards failed, or after as many restarts of those that train alone.

    Returns:
        The exit code: 0, or 1 if a rank failed.
    """
    restarts = 0
    while True:
        failures = run_once()
        if not failures:
            return 0
        cause = find_root_cause(folder, failures)
        out_of_memory = cause.kind == "out_of_memory"
        restart = not cause.final and (out_of_memory or (restarts < max_restarts and not cause.on_all_ranks))
        style = "yellow" if restart else "red"
        print_error(console, cause.message(folder), style)
        if not restart:
            return 1
        if not out_of_memory:
            restarts += 1
            text = f"starting all ranks again, from the last checkpoint ({restarts} of run.max_restarts={max_restarts})"
            print_error(console, text, style)


def check_devices(recipe: Recipe, generates: bool = True) -> None:
    """Check that this machine can run all ranks: with GPUs, one per engine; without, enough memory and cores.

    Raises:
        RecipeError: this machine has fewer GPUs, memory or cores than the recipe's ranks need.
    """
    gpus, ranks = torch.cuda.device_count(), f"{recipe.ranks_formula} = {recipe.world_size} ranks"
    fix = "start it with torchrun or srun on several machines"
    if gpus and recipe.engine_ranks > gpus:
        without = "" if recipe.engine_ranks == recipe.world_size else f", {recipe.engine_ranks} of them with an engine,"
        raise RecipeError(recipe.name, [f"{ranks}{without} exceed this machine's {gpus} GPUs: {fix}"])
    if gpus:
        return _check_shared_memory(recipe)
    needed, memory, cores = rank_bytes(recipe, generates), total_memory(), os.cpu_count() or 1
    cache = needed - RANK_PROCESS_BYTES
    others = recipe.world_size - recipe.engine_ranks  # without a cache
    max_ranks = min(others + int((memory - others * RANK_PROCESS_BYTES) // needed), MAX_RANKS_PER_CORE * cores)
    if recipe.world_size > max_ranks:
        cache_share = f" ({cache / 1e9:.1f} GB of it for rollout.kv_cache_gib)" if cache else ""
        machine = f"{memory / 1e9:.1f} GB of memory and {cores} cores"
        need = f"a rank needs at least {needed / 1e9:.1f} GB{cache_share}, and a core runs {MAX_RANKS_PER_CORE} ranks"
        problem = f"{ranks} exceed the {max_ranks} that this machine can start with {machine}: {need}"
        raise RecipeError(recipe.name, [f"{problem}: lower train.dp, or {fix}"])
    return _check_shared_memory(recipe)


def _check_shared_memory(recipe: Recipe) -> None:
    """Check that there is some shared memory: a process that writes to it when it is full is killed by SIGBUS."""
    if not SHARED_MEMORY.is_dir():
        return
    free, needed = shutil.disk_usage(SHARED_MEMORY).free >> 20, LEAST_SHARED_MIB * recipe.world_size
    if free < needed:
        problem = f"{SHARED_MEMORY} has {free:,} MiB free, and {recipe.world_size} ranks need at least {needed:,}"
        fix = f"docker run --shm-size=16g, or mount -o remount,size=16g {SHARED_MEMORY} as root"
        raise RecipeError(recipe.name, [f"{problem}: remove what others left there, or enlarge it: {fix}"])


def rank_bytes(recipe: Recipe, generates: bool = True) -> float:
    """Return the least memory in bytes that a rank needs without GPUs, with vLLM's KV cache if it generates."""
    cache = recipe.rollout.kv_cache_gib * 2**30 if recipe.rollout is not None and generates else 0
    return RANK_PROCESS_BYTES + cache


def check_node(recipe: Recipe) -> None:
    """Check, under torchrun or srun, that this node has a GPU per rank and as many ranks as the recipe expects.

    Nodes without GPUs are not checked. The ranks per node matter because they decide what crosses the network.

    Raises:
        RecipeError: there are fewer GPUs than ranks, or another number of ranks than `machine.gpus_per_node`.
    """
    gpus, local_ranks = torch.cuda.device_count(), local_world_size()
    if recipe.engine_ranks < recipe.world_size:
        local_ranks = min(local_ranks, max(0, recipe.engine_ranks - (rank() - local_rank())))
    kind = "ranks" if local_ranks == local_world_size() else "ranks with an engine"
    started = f"{local_ranks} {kind} were started on {socket.gethostname()}"
    expected = recipe.machine.gpus_per_node
    if 0 < gpus < local_ranks:
        fix = f"start {gpus} ranks per node, or make all GPUs of the node visible to each rank"
        srun_fix = f"(srun: --gpus-per-node={local_ranks}, neither --gpus-per-task nor --gpu-bind)"
        raise RecipeError(recipe.name, [f"{started}, but only {gpus} GPUs are visible to them: {fix} {srun_fix}"])
    if gpus and local_ranks not in {min(expected, recipe.engine_ranks), recipe.engine_ranks % expected, 0}:
        problem = f"{started}, but the recipe expects {expected} per node"
        raise RecipeError(recipe.name, [f"{problem}: start that many, or set machine.gpus_per_node={local_ranks}"])
