"""`hybrid3d bench`: time a recipe's sync, a gather on every rank and the network itself."""

from __future__ import annotations

import argparse
import functools
import os
import reprlib

from hybrid3d import launch_environment
from hybrid3d.cli.starting import check_world, launch_ranks, run_as_rank, set_device_connections
from hybrid3d.cli.terminal import Commands, add_recipe, make_console
from hybrid3d.config import RecipeError, load_recipe
from hybrid3d.launch_environment import CHECKED
from hybrid3d.run.folder import RunFolder

# Upper limits of the options: larger than any model, and small enough to compute with
MAX_OPTIONS = {"layers": 1_000, "hidden": 65_536, "experts": 4_096, "repeats": 10_000}


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser("bench", help="time a recipe's sync, a gather on every rank and the network itself")
    add_recipe(parser)
    parser.add_argument("--repeats", type=int, default=15, help="timed runs of each method (default: 15)")
    parser.add_argument("--layers", type=int, help="number of layers of the measured model")
    parser.add_argument(
        "--hidden", type=int, help="hidden size of the measured model; heads, MLPs and vocabulary scale"
    )
    parser.add_argument("--experts", type=int, help="number of routed experts of the measured model")
    parser.add_argument("--changed", metavar="P", type=float, help="also time syncs of this fraction of all elements")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace, arguments: list[str]) -> int:
    recipe = load_recipe(options.recipe, options.overrides)
    for name, maximum in MAX_OPTIONS.items():
        value = getattr(options, name)
        if value is not None and not 1 <= value <= maximum:
            problem = f"--{name} {reprlib.repr(value)}: expected an integer from 1 to {maximum:,}"
            raise RecipeError(recipe.name, [problem])
    if recipe.rollout is not None and recipe.rollout.quantization is not None:
        problem = (
            f"rollout.quantization={recipe.rollout.quantization}: `hybrid3d bench` compares the bits of weights that "
            "it computes, and cannot tell what they are in FP8: set rollout.quantization=null"
        )
        raise RecipeError(recipe.name, [problem])
    set_device_connections(recipe)
    from hybrid3d.bench.scaling import Scale, scale_recipe
    from hybrid3d.inputs.models import read_config

    scale = Scale(options.layers, options.hidden, options.experts)
    scaled_recipe, config = scale_recipe(recipe, scale, options.changed)
    scaling = scale.describe(read_config(recipe.model.path))
    folder = RunFolder.for_recipe(scaled_recipe)
    if launch_environment.under_launcher():
        check_world(scaled_recipe)
    if CHECKED not in os.environ:
        from hybrid3d.bench.start import check_benchmark_memory

        launch_environment.check_vllm_variables()
        check_benchmark_memory(scaled_recipe, config, options.changed)
    if launch_environment.under_launcher():
        from hybrid3d.bench.start import bench

        more = (options.repeats, options.changed, options.json)
        return run_as_rank(
            scaled_recipe, folder, functools.partial(bench, scaled_recipe, config, scaling, folder, *more)
        )
    return launch_ranks(arguments, scaled_recipe, folder, make_console(stderr=options.json))
