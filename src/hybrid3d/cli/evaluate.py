"""`hybrid3d eval`: measure the held-out accuracy of a run's checkpoint."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os

from hybrid3d import launch_environment
from hybrid3d.cli.starting import launch_ranks, load_run, run_as_rank
from hybrid3d.cli.terminal import Commands, make_console
from hybrid3d.config import Recipe, RecipeError, read_recipe
from hybrid3d.config.schema import apply_overrides, to_raw
from hybrid3d.launch_environment import CHECKED


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser("eval", help="measure the held-out accuracy of a run's checkpoint")
    parser.add_argument("folder", metavar="RUN", help="a run's folder")
    parser.add_argument("overrides", nargs="*", metavar="evaluation.key=value", help="settings that override the run's")
    parser.add_argument("--step", type=int, help="the checkpoint after this many updates (default: the last)")
    parser.add_argument("--json", action="store_true", help="print the metrics as JSON")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace, arguments: list[str]) -> int:
    others = [text for text in options.overrides if not text.strip().startswith(("evaluation.", "evaluation="))]
    if others:
        raise RecipeError("eval", [f"{text}: only settings of evaluation can differ from the run's" for text in others])
    recipe, folder, step = load_run(options, "eval")
    recipe = _with_overrides(recipe, options.overrides)
    recipe = _without_reward_model(recipe)
    if recipe.rollout is None:
        raise RecipeError(recipe.name, ["the run has no `rollout` section, which `eval` needs to generate answers"])
    if CHECKED not in os.environ:
        from hybrid3d.launch.preflight import check_evaluation

        check_evaluation(recipe, folder, step)
    if not launch_environment.under_launcher():
        return launch_ranks(arguments, recipe, folder, make_console(stderr=options.json), places=True)
    from hybrid3d.trainer import start

    recipe = dataclasses.replace(recipe, run=dataclasses.replace(recipe.run, max_restarts=0))
    return run_as_rank(
        recipe, folder, functools.partial(start.evaluate, recipe, folder, step, options.json), restarts=True
    )


def _without_reward_model(recipe: Recipe) -> Recipe:
    """Return the recipe of a run without the model that only training asks, and without its layout."""
    role = dataclasses.replace(recipe.roles.reward, tp=1, pp=1, ep=1)
    return dataclasses.replace(
        recipe,
        reward=dataclasses.replace(recipe.reward, model=None),
        roles=dataclasses.replace(recipe.roles, reward=role),
    )


def _with_overrides(recipe: Recipe, overrides: list[str]) -> Recipe:
    """Return the recipe of a run with other settings of its evaluation.

    Raises:
        RecipeError: the result is invalid; with all problems.
    """
    problems: list[str] = []
    raw = to_raw(recipe)
    apply_overrides(raw, overrides, problems)
    return read_recipe(raw, recipe.name, problems) if overrides else recipe
