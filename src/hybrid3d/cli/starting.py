"""Starts a command's ranks, or runs as one of them, with the number of hardware queues that a recipe needs.

CUDA_DEVICE_MAX_CONNECTIONS is the number of hardware queues of a GPU. With one queue, kernels of all streams start in
the order in which they are launched. Under tensor parallelism, Megatron's and Transformer Engine's backward passes rely
on it: they launch a collective first and the matrix product that hides it second
(`megatron/core/tensor_parallel/layers.py`). An overlapped sync (`sync.overlap`) wants more queues, because with one the
optimizer's kernels wait behind whatever the sync's stream waits for. Where a recipe has both, the collectives decide:
there are several of them in each layer of each micro batch, and one sync a step.

This has not been measured. The variable must be set before CUDA is initialized: this module imports no torch.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

from hybrid3d import launch_environment
from hybrid3d.cli.terminal import DONE, FAILED, make_console, path_argument
from hybrid3d.config import Recipe, RecipeError, check_layout_early, load_recipe, recipe_to_ascii
from hybrid3d.engines.compare import check_installed
from hybrid3d.launch_environment import CHECKED, recipe_variable
from hybrid3d.run.folder import RunFolder, find_checkpoint_step

if TYPE_CHECKING:
    from rich.console import Console

    from hybrid3d.launch.rank import Task
    from hybrid3d.ledger import RankStart


def check_engines() -> list[str]:
    """Check the installed engines' sources before ranks start, once on each node; return what to warn of.

    Raises:
        UserMistake: hybrid3d does not work with one of them.
    """
    if CHECKED in os.environ or (launch_environment.under_launcher() and launch_environment.local_rank() != 0):
        return []
    return check_installed()


def print_warnings(texts: Iterable[str]) -> None:
    """Print what to warn of to stderr: after all checks, so that a mistake is told alone."""
    for text in texts:
        make_console(stderr=True).print(text, style="yellow", highlight=False, markup=False, soft_wrap=True)


def launch_ranks(
    arguments: list[str],
    recipe: Recipe,
    folder: RunFolder,
    console: Console,
    lock: AbstractContextManager[None] | None = None,
    generates: bool = True,
    restarts: bool = False,
    places: bool = False,
) -> int:
    """Run a command as all ranks on this machine, holding the lock if given, and return the exit code.

    Args:
        generates: whether vLLM is started.
        restarts: whether ranks are started again when they are lost, as often as the recipe says.
        places: whether the ranks ask for their placement, which is computed while they start.
    """
    from hybrid3d.launch.launcher import check_devices, launch
    from hybrid3d.planning.agreed_placement import computing_placement

    check_devices(recipe, generates)
    placement = computing_placement(recipe, folder.path) if places else nullcontext()
    told = {CHECKED: "1", **(recipe_variable(recipe_to_ascii(recipe)) if restarts else {})}
    with lock or nullcontext(), placement, mock.patch.dict(os.environ, told):
        if not restarts:
            return launch(arguments, recipe.world_size, folder, console)
        others = range(recipe.train_ranks, recipe.world_size)
        of_rank = {rank: getattr(recipe.roles, recipe.role_of(rank)).max_restarts for rank in others}
        return launch(arguments, recipe.world_size, folder, console, recipe.run.max_restarts, of_rank)


def run_as_rank(
    recipe: Recipe,
    folder: RunFolder,
    task: Task,
    lock: AbstractContextManager[None] | None = None,
    restarts: bool = False,
) -> int:
    """Run a task as this rank, holding the lock if given, and return the exit code."""
    from hybrid3d.launch.rank import run_rank

    check_world(recipe)
    with lock or nullcontext():
        return run_rank(recipe, folder, task, CHECKED in os.environ, restarts)


def run_as_judging_rank(recipe: Recipe, folder: RunFolder, judge: Callable[..., bool]) -> int:
    """Run a task that returns whether all is as it must be, the same on every rank, and return the exit code.

    Under our own launcher a rank that finds something has not failed: the launcher reads the verdict in the folder.
    """
    passed = True

    def task(start: RankStart) -> None:
        nonlocal passed
        passed = judge(start)

    code = run_as_rank(recipe, folder, task)
    return code if code != DONE or passed or CHECKED in os.environ else FAILED


def failed_if_not(verdict: str, file: Path, code: int) -> int:
    """Return the exit code of ranks that a launcher has run, or FAILED if the verdict in their JSON file is false."""
    return code if code != DONE or json.loads(file.read_text(encoding="utf-8"))[verdict] else FAILED


def check_world(recipe: Recipe) -> None:
    """Raise RecipeError if the external launcher has not started as many ranks as the recipe has, each with a GPU."""
    from hybrid3d.launch.launcher import check_node

    started = launch_environment.world_size()
    if started != recipe.world_size:
        problem = f"{recipe.ranks_formula} = {recipe.world_size} ranks, but the launcher started {started}"
        raise RecipeError(recipe.name, [f"{problem}: start {recipe.world_size}, or set train.dp"])
    check_node(recipe)


def lock_run(folder: RunFolder) -> AbstractContextManager[None]:
    """Lock the folder of a run, printing a message to stderr while waiting."""
    return folder.lock(functools.partial(make_console(stderr=True).print, soft_wrap=True))


def find_run(text: str, option: str, command: str = "") -> RunFolder:
    """Return the folder of a run, with the logs of this command; raise RecipeError if it is none."""
    folder = RunFolder(path_argument(text, option)).with_logs_in(command)
    folder.check()
    if not folder.recipe.exists():
        raise RecipeError(str(folder.path), ["not the folder of a run: it has no recipe.yaml"])
    return folder


def load_run(options: argparse.Namespace, command: str) -> tuple[Recipe, RunFolder, int]:
    """Return a run's recipe, its folder with the logs of this command, and the requested checkpoint step."""
    folder = find_run(options.folder, "RUN", command)
    recipe = load_recipe(folder.recipe)
    recipe = replace(recipe, train=replace(recipe.train, fp8="none"))  # these commands train nothing
    if CHECKED not in os.environ:
        check_layout_early(recipe)
        from hybrid3d.inputs.checks import check_model

        check_model(recipe)
    step = find_checkpoint_step(folder, options.step)
    if CHECKED not in os.environ:
        check_origin(folder, step)
    return recipe, folder, step


def check_origin(folder: RunFolder, step: int) -> None:
    """Check that the checkpoint of a step is of this run and step; print a warning if it does not say so.

    Raises:
        ForeignCheckpoint: it is of another run or step.
    """
    from hybrid3d.run.identity import check_step

    warning = check_step(folder, step)
    if warning and (not launch_environment.under_launcher() or launch_environment.rank() == 0):
        print_warnings([warning])


VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"


def set_device_connections(recipe: Recipe) -> None:
    """Set the number of hardware queues for this process and those that it starts, unless the user has set it.

    It is one with tensor parallelism, and else CUDA's default, which is 8.
    """
    if recipe.train.tp > 1:
        os.environ.setdefault(VARIABLE, "1")
