"""`hybrid3d replay`: do a recorded step again, or find the first difference between two recorded runs."""

from __future__ import annotations

import argparse
import functools
import json
import os

from hybrid3d import launch_environment
from hybrid3d.cli.starting import failed_if_not, find_run, launch_ranks, run_as_judging_rank
from hybrid3d.cli.terminal import DONE, FAILED, Commands, make_console
from hybrid3d.config import RecipeError, check_layout_early, load_recipe
from hybrid3d.launch_environment import CHECKED
from hybrid3d.run.folder import RunFolder, replay_path


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser("replay", help="do a recorded step again, or compare two recorded runs")
    parser.add_argument("folder", metavar="RUN", help="a run's folder, of a run with the setting run.record")
    parser.add_argument("overrides", nargs="*", metavar="train.key=value", help="another train layout, with --step")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--step", type=int, help="the recorded step to do again")
    what.add_argument("--against", metavar="RUN2", help="the run to compare with: finds the first difference")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace, arguments: list[str]) -> int:
    folder = find_run(options.folder, "RUN", "replay")
    if options.against is not None:
        if options.overrides:
            raise RecipeError("replay --against", [f"{options.overrides[0]}: nothing runs that has a layout"])
        return _compare(folder, find_run(options.against, "--against"), options.json)
    from hybrid3d.replay.plan import find_start, training_recipe

    recipe = training_recipe(load_recipe(folder.recipe), options.overrides)
    start = find_start(folder, options.step)
    if CHECKED not in os.environ:
        try:
            check_layout_early(recipe)
        except RecipeError as error:
            only = "only settings of train can differ in a replay, such as train.micro_batch_size"
            raise RecipeError(error.subject, [*error.problems, only]) from None
        from hybrid3d.launch.preflight import check_replay

        check_replay(recipe, folder, start, options.step)
    if not launch_environment.under_launcher():
        code = launch_ranks(arguments, recipe, folder, make_console(stderr=options.json), generates=False)
        return failed_if_not("as_recorded", replay_path(folder, options.step), code)
    from hybrid3d.trainer.start import replay

    task = functools.partial(replay, recipe, folder, options.overrides, start, options.step, options.json)
    return run_as_judging_rank(recipe, folder, task)


def _compare(folder: RunFolder, other: RunFolder, as_json: bool) -> int:
    from hybrid3d.replay.comparison import compare_runs
    from hybrid3d.trainer.replay import print_comparison

    comparison = compare_runs(folder, other)
    if as_json:
        print(json.dumps(comparison.as_json(), indent=2))
    else:
        print_comparison(comparison, (str(folder.path), str(other.path)), make_console())
    return DONE if comparison.difference is None else FAILED
