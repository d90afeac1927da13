"""`hybrid3d eval` and `hybrid3d export`: measure the held-out accuracy of a run's checkpoint, and export it."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
from unittest import mock

from hybrid3d import launch_environment
from hybrid3d.cli.starting import launch_ranks, load_run, run_as_rank
from hybrid3d.cli.terminal import Commands, make_console, path_argument
from hybrid3d.config import Recipe, RecipeError, RoleRanks
from hybrid3d.config.load import with_overrides
from hybrid3d.launch_environment import CHECKED


def add_parser(commands: Commands) -> None:
    evaluate = commands.add_parser("eval", help="measure the held-out accuracy of a run's checkpoint")
    export = commands.add_parser("export", help="write a run's checkpoint as a Hugging Face checkpoint")
    for parser, run in ((evaluate, _evaluate), (export, _export)):
        parser.add_argument("folder", metavar="RUN", help="a run's folder")
        parser.add_argument("--step", type=int, help="the checkpoint after this many updates (default: the last)")
        parser.set_defaults(run=run)
    settings = "settings that override the run's"
    evaluate.add_argument("overrides", nargs="*", metavar="evaluation.key=value", help=settings)
    evaluate.add_argument("--json", action="store_true", help="print the metrics as JSON")
    export.add_argument("out", metavar="OUT", help="the folder to write")
    merged = "of a run with adapters, the model with them; without it, PEFT's files"
    export.add_argument("--merged", action="store_true", help=merged)


def _evaluate(options: argparse.Namespace, arguments: list[str]) -> int:
    others = [text for text in options.overrides if not text.strip().startswith(("evaluation.", "evaluation="))]
    if others:
        raise RecipeError("eval", [f"{text}: only settings of evaluation can differ from the run's" for text in others])
    recipe, folder, step = load_run(options, "eval")
    recipe = with_overrides(recipe, options.overrides) if options.overrides else recipe
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


def _export(options: argparse.Namespace, arguments: list[str]) -> int:
    out = path_argument(options.out, "OUT")
    recipe, folder, step = load_run(options, "export")
    if options.merged and recipe.lora is None:
        raise RecipeError("--merged", [f"{options.folder} has no adapters to merge: leave it out"])
    recipe = dataclasses.replace(recipe, roles=RoleRanks())  # the ranks that train hold all weights
    from hybrid3d.inputs.export import UNFINISHED, unfinished_folder

    if CHECKED not in os.environ:
        from hybrid3d.launch.preflight import check_export

        check_export(recipe, folder, step, out)
    if not launch_environment.under_launcher():
        with unfinished_folder(out) as unfinished, mock.patch.dict(os.environ, {UNFINISHED: str(unfinished)}):
            return launch_ranks(arguments, recipe, folder, make_console(), generates=False)
    from hybrid3d.trainer.export import export

    return run_as_rank(recipe, folder, functools.partial(export, recipe, folder, step, out, options.merged))
