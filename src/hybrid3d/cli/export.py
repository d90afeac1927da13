"""`hybrid3d export`: write a run's checkpoint as a Hugging Face checkpoint."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
from unittest import mock

from hybrid3d import launch_environment
from hybrid3d.cli.starting import launch_ranks, load_run, run_as_rank
from hybrid3d.cli.terminal import Commands, make_console, path_argument
from hybrid3d.config import RecipeError, RoleRanks
from hybrid3d.launch_environment import CHECKED


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser("export", help="write a run's checkpoint as a Hugging Face checkpoint")
    parser.add_argument("folder", metavar="RUN", help="a run's folder")
    parser.add_argument("out", metavar="OUT", help="the folder to write")
    parser.add_argument("--step", type=int, help="the checkpoint after this many updates (default: the last)")
    parser.add_argument(
        "--merged", action="store_true", help="of a run with adapters, the model with them; without it, PEFT's files"
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace, arguments: list[str]) -> int:
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
