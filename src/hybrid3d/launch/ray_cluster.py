"""Starts the ranks of a run on a Ray cluster: an actor for each rank, which runs it in a process of its own.

The ranks of a node are placed together, in the order of ranks, and every node must see the run's folder at the same
path. A rank is the same process as under `srun`: it knows nothing of Ray. `ray_access` is entered before this module,
which imports Ray, is imported.
"""

from __future__ import annotations

import functools
import os
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from rich.console import Console

from hybrid3d.config import Recipe, RecipeError
from hybrid3d.launch.launcher import supervise
from hybrid3d.launch.ray_access import MODE, TOKEN, TOKEN_PATH, find_token
from hybrid3d.launch_environment import CHECKED, CLOSE_SECONDS, CONNECT_SECONDS, EXIT_SECONDS, RUN
from hybrid3d.process import remove_shared_memory
from hybrid3d.run.folder import RunFolder

POLL_SECONDS = 0.3
FOR_RANKS = (
    *("NCCL_", "GLOO_", "UCX_", "HF_", "TORCH_", "PYTORCH_", "CUDA_", "OMP_", "VLLM_", "NVTE_", "TRITON_", "HYBRID3D_"),
    *("TRANSFORMERS_", "TOKENIZERS_", "WANDB_", "MLFLOW_", "OTEL_"),
)
OF_NODES = ("CUDA_VISIBLE_DEVICES", "CUDA_HOME", "CUDA_PATH", "VLLM_HOST_IP", "VLLM_PORT", "HYBRID3D_ADDRESS")
STORE_BYTES = 100_000_000  # of a local cluster's objects: no tensor is one


def launch_on_ray(
    arguments: list[str], recipe: Recipe, folder: RunFolder, console: Console, address: str, files: Path | None
) -> int:
    """Run `hybrid3d ARGUMENTS` as the ranks of a recipe on a Ray cluster.

    Args:
        address: of the cluster, as `host:port`; `auto` for one that this machine is in, `local` for a new one on it.
        files: the folder of a local cluster.

    Returns:
        The exit code: 0, or 1 if a rank failed.

    Raises:
        RecipeError: there is no cluster at the address, or it has no room for the ranks.
    """
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    _connect(address, recipe, files)
    try:
        for number, handler in handlers.items():  # Ray sets its own
            signal.signal(number, handler)
        with _placed(recipe, address) as places:
            run_once = functools.partial(_run_once, arguments, recipe, folder, places)
            return supervise(run_once, folder, console, recipe.run.max_restarts)
    finally:
        ray.shutdown()


def _connect(address: str, recipe: Recipe, files: Path | None) -> None:
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    try:
        if files is not None:
            local = {"num_cpus": recipe.world_size, "object_store_memory": STORE_BYTES, "include_dashboard": False}
            ray.init(address="local", _temp_dir=str(files), **local, **quiet)
        else:
            _check_listening(address)
            ray.init(address=address, **quiet)
    except (OSError, RuntimeError, ValueError, RayError) as error:
        reason = str(error).strip().splitlines()[0]
        problem = f"--ray {address}: {reason}: start a cluster with `ray start`, or use local"
        if os.environ.get(MODE) == "token":
            token = find_token() or f"none is found: set {TOKEN} or {TOKEN_PATH}"
            problem += f" (Ray's token: {token}; {MODE}=disabled where the cluster was started without one)"
        raise RecipeError(recipe.name, [problem]) from None


def _check_listening(address: str) -> None:
    """Check that there is something at an address `host:port`; Ray itself waits for it for minutes."""
    host, colon, port = address.rpartition(":")
    if colon:
        with socket.create_connection((host, int(port)), CONNECT_SECONDS):
            pass


class Place(NamedTuple):
    """Ranks that are together on a node, and the bundle of resources that is theirs."""

    ranks: range
    group: PlacementGroup
    bundle: int

    @property
    def gpus(self) -> int:
        """The number of GPUs of each rank."""
        return int("GPU" in self.group.bundle_specs[self.bundle])


@contextmanager
def _placed(recipe: Recipe, address: str) -> Iterator[list[Place]]:
    """Reserve a part of a node for the ranks of each node of the recipe, and CPUs anywhere for those without engine."""
    unit = "GPU" if ray.cluster_resources().get("GPU") else "CPU"
    nodes, others = _ranks_by_node(recipe), range(recipe.engine_ranks, recipe.world_size)
    sizes = [len(ranks) for ranks in nodes]
    found = sorted((int(n["Resources"].get(unit, 0)) for n in ray.nodes() if n["Alive"]), reverse=True)
    enough = len(found) >= len(sizes) and all(have >= need for have, need in zip(found, sizes, strict=False))
    per_node, cpus = recipe.machine.gpus_per_node, int(ray.cluster_resources().get("CPU", 0))
    problem = f"{recipe.ranks_formula} = {recipe.world_size} ranks, {per_node} on a node (machine.gpus_per_node)"
    if others:
        problem += f", {len(others)} of them without an engine on any node"
    if not enough:
        has = ", ".join(map(str, found))
        raise RecipeError(recipe.name, [f"{problem}, but the nodes of the Ray cluster at {address} have {has} {unit}s"])
    if cpus < recipe.world_size:
        raise RecipeError(recipe.name, [f"{problem}, but the Ray cluster at {address} has {cpus} CPUs: one per rank"])
    bundles = [{"CPU": size, **({"GPU": size} if unit == "GPU" else {})} for size in sizes]
    groups = [placement_group(bundles, strategy="STRICT_SPREAD" if len(bundles) > 1 else "STRICT_PACK")]
    places = [Place(ranks, groups[0], i) for i, ranks in enumerate(nodes)]
    if others:
        groups.append(placement_group([{"CPU": 1}] * len(others), strategy="SPREAD"))
        places += [Place(range(rank, rank + 1), groups[1], i) for i, rank in enumerate(others)]
    try:
        if not all(group.wait(CLOSE_SECONDS) for group in groups):
            busy = f"the Ray cluster at {address} has had no room for {CLOSE_SECONDS:g} s: others use it"
            raise RecipeError(recipe.name, [f"{problem}: {busy}"])
        yield places
    finally:
        for group in groups:
            remove_placement_group(group)


def _ranks_by_node(recipe: Recipe) -> list[range]:
    """Return the ranks with an engine of each node."""
    per_node, world = recipe.machine.gpus_per_node, recipe.engine_ranks
    return [range(first, min(first + per_node, world)) for first in range(0, world, per_node)]


@ray.remote(max_restarts=0, max_task_retries=0, max_concurrency=2)
class _RankProcess:
    """Runs a rank, which the kernel kills when this actor exits."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def location(self) -> tuple[str, int, list[str]]:
        """Return this node's address, a free port, and the GPUs of this actor."""
        host = ray.util.get_node_ip_address()
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as free:
            free.bind((host, 0))
            port = free.getsockname()[1]
        gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        return host, port, list(gpus)

    def run(self, arguments: Sequence[str], variables: dict[str, str], folder: str, output: str) -> int:
        """Run the rank, and return its exit code, negative for a signal."""
        command = [sys.executable, "-m", "hybrid3d", *arguments]
        with open(output, "ab") as log:
            self._process = subprocess.Popen(command, env=os.environ | variables, cwd=folder, stdout=log, stderr=log)
            return self._process.wait()

    def stop(self) -> None:
        """Kill the rank, while `run` waits for it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def clean(self, run_id: str) -> None:
        """Remove the shared memory that ranks of this node have left."""
        remove_shared_memory(run_id)


def _run_once(arguments: list[str], recipe: Recipe, folder: RunFolder, places: Sequence[Place]) -> dict[int, int]:
    """Run all ranks once and return the exit code of each that failed, negative for a signal."""
    folder.logs.mkdir(parents=True, exist_ok=True)
    for old in folder.logs.glob("rank-*.failure"):
        old.unlink()
    output = folder.logs / "console.log"
    output.write_bytes(b"")
    run_id = f"hybrid3d-{uuid.uuid4().hex[:12]}"
    actors = _start_actors(places)
    try:
        try:
            locations = ray.get([actor.location.remote() for actor in actors], timeout=CLOSE_SECONDS)
        except ray.exceptions.RayError as error:  # a node was lost, and the ranks are started again
            lost = f"the nodes of its ranks do not answer within {CLOSE_SECONDS:g} s"
            raise RecipeError(recipe.name, [f"{lost}: {type(error).__name__}: start it again when they do"]) from error
        host, port, _ = locations[0]
        running = {}
        for ranks, *_ in places:
            gpus = ",".join(gpu for rank in ranks for gpu in locations[rank][2])
            for local, rank in enumerate(ranks):
                variables = {
                    **user_variables(),
                    **{"RANK": str(rank), "WORLD_SIZE": str(recipe.world_size)},
                    **{"LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(len(ranks))},
                    **{"MASTER_ADDR": host, "MASTER_PORT": str(port), CHECKED: "1", RUN: run_id},
                    **({"CUDA_VISIBLE_DEVICES": gpus} if gpus else {}),
                    "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
                    "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
                }
                path = output if rank == 0 else folder.logs / f"rank-{rank}.console"
                done = actors[rank].run.remote(arguments, variables, os.getcwd(), str(path.resolve()))
                running[done] = rank
        return _wait(running, output)
    finally:
        _wait_for([actor.stop.remote() for actor in actors])
        _wait_for([actors[ranks[0]].clean.remote(run_id) for ranks, *_ in places])
        for actor in actors:
            ray.kill(actor)


def user_variables() -> dict[str, str]:
    """Return the variables that a user sets for libraries of a run, which the nodes' own environments do not have."""
    return {name: value for name, value in os.environ.items() if name.startswith(FOR_RANKS) and name not in OF_NODES}


def _wait_for(calls: list[Any]) -> None:
    """Wait for calls whose results do not matter, but not for long: an actor or its node may be lost."""
    ray.wait(calls, num_returns=len(calls), timeout=EXIT_SECONDS)


def _start_actors(places: Sequence[Place]) -> list[Any]:
    """Return the actor of each rank, in the order of ranks."""
    actors = []
    for place in places:
        strategy = PlacementGroupSchedulingStrategy(place.group, placement_group_bundle_index=place.bundle)
        options = _RankProcess.options(  # type: ignore[attr-defined]
            num_cpus=1, num_gpus=place.gpus, scheduling_strategy=strategy
        )
        actors += [options.remote() for _ in place.ranks]
    return actors


def _wait(running: dict[Any, int], output: Path) -> dict[int, int]:
    """Print what rank 0 prints until all ranks are done or one has failed; return the exit codes of those that have."""
    failures: dict[int, int] = {}
    with output.open("rb") as printed:
        while running and not failures:
            failures |= _finished(running, POLL_SECONDS)
            with suppress(OSError):  # nobody reads it
                sys.stdout.buffer.write(printed.read())
                sys.stdout.flush()
        if failures:
            failures |= _finished(running, EXIT_SECONDS, len(running))
    return failures


def _finished(running: dict[Any, int], seconds: float, most: int = 1) -> dict[int, int]:
    """Wait until so many ranks are done, or time is over; remove them, and return exit codes of those that failed."""
    failures: dict[int, int] = {}
    if not running:
        return failures
    done, _ = ray.wait(list(running), num_returns=min(most, len(running)), timeout=seconds)
    for future in done:
        rank = running.pop(future)
        try:
            code = ray.get(future)
        except RayError:  # the actor, or its node, is lost
            code = -9
        if code:
            failures[rank] = code
    return failures
