"""`hybrid3d train`: train a recipe, or resume its run."""

from __future__ import annotations

import argparse
import functools
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from hybrid3d import launch_environment
from hybrid3d.cli.starting import (
    check_engines,
    launch_ranks,
    lock_run,
    print_warnings,
    run_as_rank,
    set_device_connections,
)
from hybrid3d.cli.terminal import DONE, Commands, add_recipe, make_console
from hybrid3d.config import Recipe, RecipeError, check_layout_early, load_recipe, recipe_from_yaml
from hybrid3d.launch_environment import CHECKED, RECIPE
from hybrid3d.run.folder import RunFolder, checkpoint_folder, checkpoint_steps
from hybrid3d.scoring.environments import find_environment
from hybrid3d.scoring.functions import find_reward

if TYPE_CHECKING:
    from rich.console import Console

MAX_EARLY_BYTES = 16 * 2**20  # of JSON Lines, which are parsed whole, about half a second; larger ones later


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser("train", help="train a recipe, or resume its run")
    add_recipe(parser)
    parser.add_argument("--ray", metavar="ADDRESS", help="start the ranks on a Ray cluster: host:port, auto or local")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace, arguments: list[str]) -> int:
    told = os.environ.pop(RECIPE, None)  # it is not for what this process starts
    recipe = load_recipe(options.recipe, options.overrides) if told is None else recipe_from_yaml(told, options.recipe)
    set_device_connections(recipe)
    folder = RunFolder.for_recipe(recipe)
    if CHECKED not in os.environ:
        check_layout_early(recipe)
        check_data_early(recipe)
        warnings = check_engines()
        from hybrid3d.launch.launcher import check_devices
        from hybrid3d.launch.preflight import check_ray, check_run
        from hybrid3d.run.live_settings import check_schedule

        if options.ray is not None:
            check_ray(recipe)
        elif not launch_environment.under_launcher():
            check_devices(recipe)
        check_run(recipe)
        check_schedule(recipe)
        print_warnings(warnings)
    console = make_console()
    if launch_environment.under_launcher():
        from hybrid3d.trainer import start

        must_lock = CHECKED not in os.environ and launch_environment.rank() == 0  # our own launcher holds the lock
        task = functools.partial(start.train, recipe, folder)
        return run_as_rank(recipe, folder, task, lock_run(folder) if must_lock else None, restarts=True)
    if options.ray is not None:
        from hybrid3d.launch.ray_access import ray_access

        with lock_run(folder), ray_access(options.ray, folder) as files:
            from hybrid3d.launch.ray_cluster import launch_on_ray

            code = launch_on_ray(arguments, recipe, folder, console, options.ray, files)
    else:
        lock, places = lock_run(folder), recipe.algorithm.generates
        code = launch_ranks(arguments, recipe, folder, console, lock, restarts=True, places=places)
    if code == DONE:
        _print_results(recipe, folder, console)
    return code


def _print_results(recipe: Recipe, folder: RunFolder, console: Console) -> None:
    last = checkpoint_folder(folder, checkpoint_steps(folder)[-1])
    lines = [f"\ncheckpoint  {last}", f"metrics     {folder.metrics}", f"curves      {folder.curves}"]
    command = shlex.quote(os.path.relpath(Path(sys.executable).with_name("hybrid3d")))
    if recipe.rollout is not None:
        lines.append(f"evaluate    {command} eval {shlex.quote(str(folder.path))}")
    lines.append(f"export      {command} export {shlex.quote(str(folder.path))} OUT")
    console.print("\n".join(lines), soft_wrap=True)


def check_data_early(recipe: Recipe) -> None:
    """Check that data files and their columns are there, and the form of the names of reward and environment.

    It imports neither torch nor an engine. `check_run` checks the rows, and loads the functions.

    Raises:
        RecipeError, DataError: by the first that is wrong.
    """
    problems = list(_name_problems(recipe))
    if problems:
        raise RecipeError(recipe.name, problems)
    from hybrid3d.rl.data_files import JSON_LINES, check_columns  # pyarrow, half a second

    data = recipe.data
    columns = (data.prompt, data.chosen, data.rejected) if recipe.algorithm.uses_pairs else (data.prompt, data.answer)
    files = [(path, columns) for path in (data.train, data.eval)]
    files += [(path, (data.prompt, data.answer)) for path in recipe.evaluation.data.values()]
    for path, wanted in files:
        if Path(path).suffix == JSON_LINES and Path(path).is_file() and Path(path).stat().st_size > MAX_EARLY_BYTES:
            continue
        chats = [column for column in wanted if column == data.prompt or recipe.algorithm.uses_pairs]
        check_columns(path, wanted, chats if data.chat_template else ())


def _name_problems(recipe: Recipe) -> Iterator[str]:
    rollout = recipe.rollout
    names: list[tuple[str, Callable[[str], object], str]] = [("reward.name", find_reward, recipe.reward.name)]
    if rollout is not None and rollout.environment is not None:
        names.append(("rollout.environment", find_environment, rollout.environment))
    for key, find, name in names:
        try:
            find(name)
        except ValueError as error:
            yield f"{key}: {error}"
