"""`hybrid3d eval`: measure the held-out accuracy of a run's checkpoint."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os

from hybrid3d import launch_environment
from hybrid3d.cli.starting import launch_ranks, load_run, run_as_rank
from hybrid3d.cli.terminal import Commands, make_console
from hybrid3d.config import RecipeError
from hybrid3d.launch_environment import CHECKED


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser("eval", help="measure the held-out accuracy of a run's checkpoint")
    parser.add_argument("folder", metavar="RUN", help="a run's folder")
    parser.add_argument("--step", type=int, help="the checkpoint after this many updates (default: the last)")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace, arguments: list[str]) -> int:
    recipe, folder, step = load_run(options, "eval")
    recipe = dataclasses.replace(recipe, reward=dataclasses.replace(recipe.reward, model=None))  # which is for training
    if recipe.rollout is None:
        raise RecipeError(recipe.name, ["the run has no `rollout` section, which `eval` needs to generate answers"])
    if CHECKED not in os.environ:
        from hybrid3d.launch.preflight import check_evaluation

        check_evaluation(recipe, folder, step)
    if not launch_environment.under_launcher():
        return launch_ranks(arguments, recipe, folder, make_console())
    from hybrid3d.launch import tasks

    recipe = dataclasses.replace(recipe, run=dataclasses.replace(recipe.run, max_restarts=0))
    return run_as_rank(recipe, folder, functools.partial(tasks.evaluate, recipe, folder, step), restarts=True)
