"""The command line: `hybrid3d train | eval | export | plan | bench`.

Exit codes: 0 done, 2 a mistake of the user's (found before ranks start), 1 the run failed.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

from rich.console import Console

from hybrid3d import __version__, ranks
from hybrid3d.config import Recipe, RecipeError, load_recipe
from hybrid3d.run_folder import RunFolder

if TYPE_CHECKING:
    from hybrid3d.worker import Task

DONE, FAILED, MISTAKE = 0, 1, 2

# The launcher has checked everything already for the ranks that it starts
CHECKED = "HYBRID3D_CHECKED"


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    options = _parse(arguments)
    ranks.adopt_slurm()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a recipe's paths are local: nothing is looked up elsewhere
    from hybrid3d.preflight import USER_MISTAKES

    try:
        return int(options.run(options, arguments))
    except USER_MISTAKES as error:
        if ranks.under_launcher() and ranks.rank() > 0:
            from hybrid3d import rendezvous

            rendezvous.report(str(error))  # rank 0 says it, once
        else:
            Console(stderr=True).print(f"{error}", style="red", highlight=False, markup=False, soft_wrap=True)
        return MISTAKE


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Settings may stand anywhere behind the recipe; argparse alone takes none behind an option."""
    parser = _parser()
    options, others = parser.parse_known_args(arguments)
    settings = [text for text in others if "=" in text and not text.startswith("-")]
    if len(settings) < len(others) or (settings and not hasattr(options, "overrides")):
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    if settings:
        options.overrides = [*options.overrides, *settings]
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hybrid3d", description=__doc__.split("\n")[0])
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="train a recipe, or resume its run")
    train.add_argument("recipe", help="a recipe's YAML file")
    train.add_argument("overrides", nargs="*", metavar="key=value", help="settings in place of the recipe's")
    train.set_defaults(run=_train)

    evaluate = commands.add_parser("eval", help="held-out accuracy of a run's checkpoint")
    evaluate.add_argument("folder", metavar="RUN", help="a run's folder")
    evaluate.add_argument("--step", type=int, help="the checkpoint after this many updates (default: the last)")
    evaluate.set_defaults(run=_evaluate)

    export = commands.add_parser("export", help="write a run's checkpoint as a Hugging Face checkpoint")
    export.add_argument("folder", metavar="RUN", help="a run's folder")
    export.add_argument("out", metavar="OUT", help="the folder to write")
    export.add_argument("--step", type=int, help="the checkpoint after this many updates (default: the last)")
    export.set_defaults(run=_export)

    plan = commands.add_parser("plan", help="what every sync of a recipe will move, without starting ranks")
    plan.add_argument("recipe", help="a recipe's YAML file")
    plan.add_argument("overrides", nargs="*", metavar="key=value", help="settings in place of the recipe's")
    plan.add_argument("--json", action="store_true", help="print the numbers as JSON")
    plan.add_argument("--picture", metavar="FILE", help="draw who sends how much to whom, as PNG, SVG or PDF")
    plan.set_defaults(run=_plan)

    bench = commands.add_parser("bench", help="time a recipe's sync beside the way of other trainers and the wire")
    bench.add_argument("recipe", help="a recipe's YAML file")
    bench.add_argument("overrides", nargs="*", metavar="key=value", help="settings in place of the recipe's")
    bench.add_argument("--repeats", type=int, default=15, help="timed runs of each method (default: 15)")
    bench.add_argument("--layers", type=int, help="layers of the model that is measured")
    bench.add_argument("--hidden", type=int, help="its hidden size; heads, MLPs and vocabulary shrink with it")
    bench.add_argument("--experts", type=int, help="its routed experts")
    bench.add_argument("--json", action="store_true", help="print the numbers as JSON")
    bench.set_defaults(run=_bench)
    return parser


def _train(options: argparse.Namespace, arguments: list[str]) -> int:
    recipe = load_recipe(options.recipe, options.overrides)
    folder = RunFolder.of(recipe)
    if CHECKED not in os.environ:
        from hybrid3d.control import check_schedule
        from hybrid3d.preflight import check_run

        check_run(recipe)
        check_schedule(recipe)
    console = Console()
    if ranks.under_launcher():
        from hybrid3d import tasks

        alone = CHECKED not in os.environ and ranks.rank() == 0
        return _run_rank(
            recipe, folder, functools.partial(tasks.train, recipe, folder), _held(folder) if alone else None
        )
    code = _launch(arguments, recipe, folder, console, _held(folder))
    if code == DONE:
        _say_where(recipe, folder, console)
    return code


def _evaluate(options: argparse.Namespace, arguments: list[str]) -> int:
    recipe, folder, step = _finished(options, "eval")
    if recipe.rollout is None:
        raise RecipeError(recipe.name, ["the run has no `rollout` section: there is nothing to generate with"])
    if CHECKED not in os.environ:
        from hybrid3d.preflight import check_evaluation

        check_evaluation(recipe, folder, step)
    if not ranks.under_launcher():
        return _launch(arguments, recipe, folder, Console())
    from hybrid3d import tasks

    return _run_rank(recipe, folder, functools.partial(tasks.evaluate, recipe, folder, step))


def _export(options: argparse.Namespace, arguments: list[str]) -> int:
    recipe, folder, step = _finished(options, "export")
    out = Path(options.out)
    from hybrid3d.exporting import UNFINISHED, unfinished_folder

    if CHECKED not in os.environ:
        from hybrid3d.preflight import check_export

        check_export(recipe, folder, step, out)
    if not ranks.under_launcher():
        with unfinished_folder(out) as unfinished, mock.patch.dict(os.environ, {UNFINISHED: str(unfinished)}):
            return _launch(arguments, recipe, folder, Console())
    from hybrid3d import tasks

    return _run_rank(recipe, folder, functools.partial(tasks.export, recipe, folder, step, out))


def _plan(options: argparse.Namespace, arguments: list[str]) -> int:
    from hybrid3d.preflight import check_model

    recipe = load_recipe(options.recipe, options.overrides)
    if recipe.rollout is None:
        raise RecipeError(recipe.name, ["the recipe has no `rollout` section: there is no sync to plan"])
    config = check_model(recipe, planned=True)
    from hybrid3d.planning.page import draw, page_of
    from hybrid3d.planning.report import report

    with Console(stderr=True).status("") as status:
        found = report(recipe, config, say=status.update)
    if options.picture:
        draw(found, Path(options.picture))
    if options.json:
        print(json.dumps(found.numbers(), indent=2))
    else:
        Console().print(page_of(found))
    return DONE


def _bench(options: argparse.Namespace, arguments: list[str]) -> int:
    from hybrid3d import tasks
    from hybrid3d.bench.scaling import Scale, scaled
    from hybrid3d.inputs import read_config

    recipe = load_recipe(options.recipe, options.overrides)
    scale = Scale(options.layers, options.hidden, options.experts)
    smaller, config = scaled(recipe, scale)
    said = scale.said(read_config(recipe.model.path))
    if options.repeats < 1:
        raise RecipeError(smaller.name, [f"--repeats {options.repeats}: it takes 1 at least"])
    folder = RunFolder.of(smaller)
    if ranks.under_launcher():
        _check_world(smaller)
    if CHECKED not in os.environ:
        from hybrid3d.bench.fitting import check_room

        check_room(smaller, config)
    if ranks.under_launcher():
        task = functools.partial(tasks.bench, smaller, config, said, folder, options.repeats, options.json)
        return _run_rank(smaller, folder, task)
    return _launch(arguments, smaller, folder, Console(stderr=options.json))


def _finished(options: argparse.Namespace, command: str) -> tuple[Recipe, RunFolder, int]:
    """A run's recipe, its folder with this command's logs, and the checkpoint asked for."""
    from hybrid3d.run_folder import find_step

    folder = RunFolder(Path(options.folder)).logging_to(command)
    folder.check()
    if not folder.recipe.exists():
        raise RecipeError(str(folder.path), ["no run's folder: it has no recipe.yaml"])
    recipe = load_recipe(folder.recipe)
    if CHECKED not in os.environ:
        from hybrid3d.preflight import check_model

        check_model(recipe)
    return recipe, folder, find_step(folder, options.step)


def _held(folder: RunFolder) -> AbstractContextManager[None]:
    """The folder of a run for this start alone."""
    return folder.held(functools.partial(Console(stderr=True).print, highlight=False, markup=False, soft_wrap=True))


def _run_rank(
    recipe: Recipe, folder: RunFolder, task: Task, holding: AbstractContextManager[None] | None = None
) -> int:
    from hybrid3d.worker import run_rank

    _check_world(recipe)
    with holding or nullcontext():
        return run_rank(recipe, folder, task, launched=CHECKED in os.environ)


def _check_world(recipe: Recipe) -> None:
    """An external launcher must have started as many ranks as the recipe's layout has, each with its GPU."""
    from hybrid3d.launcher import check_node

    started = ranks.world_size()
    if started != recipe.world_size:
        problem = f"train.tp x pp x cp x dp = {recipe.world_size} ranks, but the launcher started {started}"
        raise RecipeError(recipe.name, [f"{problem}: start as many, or set train.dp"])
    check_node(recipe)


def _launch(
    arguments: list[str],
    recipe: Recipe,
    folder: RunFolder,
    console: Console,
    holding: AbstractContextManager[None] | None = None,
) -> int:
    from hybrid3d.launcher import check_devices, launch

    check_devices(recipe)
    with holding or nullcontext(), mock.patch.dict(os.environ, {CHECKED: "1"}):
        return launch(arguments, recipe.world_size, folder, console)


def _say_where(recipe: Recipe, folder: RunFolder, console: Console) -> None:
    from hybrid3d.run_folder import checkpoint_folder, steps_in

    last = checkpoint_folder(folder, steps_in(folder)[-1])
    told = [f"\ncheckpoint  {last}", f"metrics     {folder.metrics}", f"curves      {folder.curves}"]
    command = os.path.relpath(Path(sys.executable).with_name("hybrid3d"))
    if recipe.rollout is not None:
        told.append(f"evaluate    {command} eval {folder.path}")
    told.append(f"export      {command} export {folder.path} OUT")
    console.print("\n".join(told), soft_wrap=True, highlight=False, markup=False)
