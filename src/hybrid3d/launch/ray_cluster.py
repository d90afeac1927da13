"""Starts the ranks of a run on a Ray cluster: an actor for each rank, which runs it in a process of its own.

The ranks of a node are placed together, in the order of ranks, and every node must see the run's folder at the same
path. A rank is the same process as under `srun`: it knows nothing of Ray. Ranks that the run does not wait for
(`roles.generation.ranks_at_start`) start as soon as a node has room for them, and again when their node is lost.
`ray_access` is entered before this module, which imports Ray, is imported.
"""

from __future__ import annotations

import functools
import itertools
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from rich.console import Console

from hybrid3d.config import Recipe, RecipeError, recipe_to_ascii
from hybrid3d.launch.launcher import new_run_id, supervise
from hybrid3d.launch.ray_access import MODE, TOKEN, TOKEN_PATH, find_token
from hybrid3d.launch_environment import (
    CHECKED,
    CLOSE_SECONDS,
    CONNECT_SECONDS,
    EXIT_SECONDS,
    PARENT,
    RUN,
    recipe_variable,
)
from hybrid3d.process import remove_shared_memory
from hybrid3d.run.ends import Ended, read_end
from hybrid3d.run.folder import RunFolder
from hybrid3d.run.terminal import print_error

POLL_SECONDS = 0.3
LOST = -signal.SIGKILL  # exit code of a rank whose node is lost
CONSOLE = "console.log"  # in the folder of logs: what rank 0 prints
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
            run_once = functools.partial(_run_once, arguments, recipe, folder, console, places)
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

    @property
    def is_reserved(self) -> bool:
        """Whether a node has room for them; Ray looks for another one when that node is lost."""
        return bool(placement_group_table(self.group)["state"] == "CREATED")


@contextmanager
def _placed(recipe: Recipe, address: str) -> Iterator[list[Place]]:
    """Reserve a part of a node for the ranks of each node at the start, and CPUs anywhere for those without engine."""
    unit = "GPU" if ray.cluster_resources().get("GPU") else "CPU"
    others, needed = range(recipe.engine_ranks, recipe.world_size), recipe.world_size - len(recipe.late_ranks)
    nodes = _ranks_by_node(recipe, late=False)
    sizes = [len(ranks) for ranks in nodes]
    found = sorted((int(n["Resources"].get(unit, 0)) for n in ray.nodes() if n["Alive"]), reverse=True)
    enough = len(found) >= len(sizes) and all(have >= need for have, need in zip(found, sizes, strict=False))
    per_node, cpus = recipe.machine.gpus_per_node, int(ray.cluster_resources().get("CPU", 0))
    problem = f"{recipe.ranks_formula} = {recipe.world_size} ranks, {per_node} on a node (machine.gpus_per_node)"
    if recipe.late_ranks:
        problem += f", {needed} of them at the start (roles.generation.ranks_at_start)"
    if others:
        problem += f", {len(others)} of them without an engine on any node"
    if not enough:
        has = ", ".join(map(str, found))
        raise RecipeError(recipe.name, [f"{problem}, but the nodes of the Ray cluster at {address} have {has} {unit}s"])
    if cpus < needed:
        raise RecipeError(recipe.name, [f"{problem}, but the Ray cluster at {address} has {cpus} CPUs: one per rank"])
    bundles = [_bundle(len(ranks), unit) for ranks in nodes]
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


def _bundle(size: int, unit: str) -> dict[str, float]:
    return {"CPU": size, **({"GPU": size} if unit == "GPU" else {})}


def _ranks_by_node(recipe: Recipe, late: bool) -> list[range]:
    """Return the ranks with an engine of each node: of those that may come late, or of the others."""
    per_node, world = recipe.machine.gpus_per_node, recipe.engine_ranks
    nodes = [range(first, min(first + per_node, world)) for first in range(0, world, per_node)]
    return [ranks for ranks in nodes if (ranks.start in recipe.late_ranks) == late]


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
        own = os.environ | variables | {PARENT: str(os.getpid())}
        with open(output, "ab") as log:
            self._process = subprocess.Popen(command, env=own, cwd=folder, stdout=log, stderr=log)
            return self._process.wait()

    def stop(self) -> None:
        """Kill the rank, while `run` waits for it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def clean(self, run_id: str) -> None:
        """Remove the shared memory that ranks of this node have left."""
        remove_shared_memory(run_id)


def _run_once(
    arguments: list[str], recipe: Recipe, folder: RunFolder, console: Console, places: Sequence[Place]
) -> dict[int, int]:
    """Run all ranks once and return the exit code of each that failed, negative for a signal."""
    folder.logs.mkdir(parents=True, exist_ok=True)
    (folder.logs / CONSOLE).write_bytes(b"")
    ranks = _Ranks(arguments, recipe, folder, console)
    try:
        try:
            ranks.start(places)
        except RayError as error:  # a node was lost, and the ranks are started again
            lost = f"the nodes of its ranks do not answer within {CLOSE_SECONDS:g} s"
            raise RecipeError(recipe.name, [f"{lost}: {type(error).__name__}: start it again when they do"]) from error
        for late in _ranks_by_node(recipe, late=True):
            ranks.add(late, "GPU" if places[0].gpus else "CPU")
        return ranks.wait()
    finally:
        ranks.end()


class _Ranks:
    """The ranks of one start of a run, each in an actor."""

    def __init__(self, arguments: Sequence[str], recipe: Recipe, folder: RunFolder, console: Console):
        self._arguments, self._recipe, self._folder, self._console = arguments, recipe, folder, console
        self._run_id = new_run_id(folder)
        self._meeting: dict[str, str] = {}  # where the ranks meet
        self._actors: dict[Place, list[Any]] = {}
        self._calls: dict[Place, list[Any]] = {}  # for the locations of actors that are starting
        self._running: dict[Any, tuple[Place, int]] = {}
        self._late: list[Place] = []

    def start(self, places: Sequence[Place]) -> None:
        """Start the ranks of places that others wait for, with the first rank; `RayError` if a node does not answer."""
        for place in places:
            self._start_actors(place)
        ray.get(list(itertools.chain(*self._calls.values())), timeout=CLOSE_SECONDS)
        for place in places:
            self._start_ranks(place)

    def add(self, ranks: range, unit: str) -> None:
        """Start ranks of a node when there is room for them. The run goes on without those that fail."""
        group = placement_group([_bundle(len(ranks), unit)], strategy="STRICT_PACK")
        self._late.append(Place(ranks, group, 0))

    def _start_actors(self, place: Place) -> None:
        """Start the actor of each rank of a place, in the order of ranks."""
        strategy = PlacementGroupSchedulingStrategy(place.group, placement_group_bundle_index=place.bundle)
        options = _RankProcess.options(  # type: ignore[attr-defined]
            num_cpus=1, num_gpus=place.gpus, scheduling_strategy=strategy
        )
        self._actors[place] = [options.remote() for _ in place.ranks]
        self._calls[place] = [actor.location.remote() for actor in self._actors[place]]

    def _start_ranks(self, place: Place) -> None:
        """Start the ranks of a place whose actors have started, which tell on which node."""
        located = ray.get(self._calls.pop(place))
        self._meeting = self._meeting or {"MASTER_ADDR": located[0][0], "MASTER_PORT": str(located[0][1])}
        gpus = ",".join(gpu for _, _, of_actor in located for gpu in of_actor)
        for local, (rank, actor) in enumerate(zip(place.ranks, self._actors[place], strict=True)):
            variables = {
                **user_variables(),
                **self._meeting,
                **{"RANK": str(rank), "WORLD_SIZE": str(self._recipe.world_size)},
                **{"LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(len(place.ranks))},
                **{CHECKED: "1", RUN: self._run_id},
                **recipe_variable(recipe_to_ascii(self._recipe)),
                **({"CUDA_VISIBLE_DEVICES": gpus} if gpus else {}),
                "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
                "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
            }
            output = str(self._output(rank).resolve())
            done = actor.run.remote(self._arguments, variables, os.getcwd(), output)
            self._running[done] = place, rank

    def _output(self, rank: int) -> Path:
        return self._folder.logs / (CONSOLE if rank == 0 else f"rank-{rank}.console")

    def wait(self) -> dict[int, int]:
        """Print what rank 0 prints until all ranks are done or one has failed, and return the codes of those that have.

        Ranks that may come late are none of them.
        """
        failures: dict[int, int] = {}
        with self._output(0).open("rb") as printed:
            while not failures and any(place not in self._late for place, _ in self._running.values()):
                self._start_late()
                for place, rank, code in self._finished(POLL_SECONDS):
                    if place not in self._late:
                        failures |= {rank: LOST if code is None else code} if code != 0 else {}
                    elif code is None:
                        self._lose(place)
                    elif code:
                        self._report_late(rank, code)
                with suppress(OSError):  # nobody reads it
                    sys.stdout.buffer.write(printed.read())
                    sys.stdout.flush()
        seconds = EXIT_SECONDS if failures else CLOSE_SECONDS
        for place, rank, code in self._finished(seconds, len(self._running)):
            if code != 0 and place not in self._late:
                failures[rank] = LOST if code is None else code
        return failures

    def _start_late(self) -> None:
        """Start actors where there is room for ranks that may come late, and the ranks of those that have started."""
        for place in self._late:
            if place not in self._actors and place.is_reserved:
                self._start_actors(place)
        for place, calls in list(self._calls.items()):
            if len(ray.wait(calls, num_returns=len(calls), timeout=0)[0]) == len(calls):
                try:
                    self._start_ranks(place)
                except RayError:
                    self._lose(place)

    def _lose(self, place: Place) -> None:
        """Give up ranks that may come late and have lost their node; they are started again when there is room."""
        ranks = ", ".join(map(str, place.ranks))
        print_error(self._console, f"The node of ranks {ranks} is lost: they start again when there is room", "yellow")
        self._stop([place])
        self._kill([place])

    def _report_late(self, rank: int, code: int) -> None:
        end = read_end(self._folder, rank) or Ended.by_code(rank, code)
        message = f"{end.message(self._folder)}\nwhat it printed: {self._output(rank)}\nThe run goes on without it"
        print_error(self._console, message, "yellow")
        self._folder.failure_path(rank).unlink(missing_ok=True)  # it is not the cause of what comes

    def _finished(self, seconds: float, most: int = 1) -> list[tuple[Place, int, int | None]]:
        """Wait until so many ranks are done, or time is over; return their places, numbers and exit codes.

        Where an actor, or its node, is lost, the code is None.
        """
        if not self._running:
            return []
        found: list[tuple[Place, int, int | None]] = []
        for future in ray.wait(list(self._running), num_returns=min(most, len(self._running)), timeout=seconds)[0]:
            code: int | None = None
            with suppress(RayError):
                code = ray.get(future)
            found.append((*self._running.pop(future), code))
        return found

    def end(self) -> None:
        """End all ranks, and remove what they have left."""
        places = list(self._actors)
        first = [self._actors[place][0] for place in places]
        self._stop(places)
        _wait_for([actor.clean.remote(self._run_id) for actor in first])
        self._kill(places)
        for place in self._late:
            remove_placement_group(place.group)

    def _stop(self, places: Sequence[Place]) -> None:
        _wait_for([actor.stop.remote() for place in places for actor in self._actors[place]])

    def _kill(self, places: Sequence[Place]) -> None:
        for place in places:
            for actor in self._actors.pop(place):
                ray.kill(actor)
            self._calls.pop(place, None)
        self._running = {future: of for future, of in self._running.items() if of[0] not in places}


def user_variables() -> dict[str, str]:
    """Return the variables that a user sets for libraries of a run, which the nodes' own environments do not have."""
    return {name: value for name, value in os.environ.items() if name.startswith(FOR_RANKS) and name not in OF_NODES}


def _wait_for(calls: list[Any]) -> None:
    """Wait for calls whose results do not matter, but not for long: an actor or its node may be lost."""
    ray.wait(calls, num_returns=len(calls), timeout=EXIT_SECONDS)
