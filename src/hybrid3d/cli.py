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
from typing import TYPE_CHECKING, NoReturn
from unittest import mock

from hybrid3d import __version__, launch_environment
from hybrid3d.config import Recipe, RecipeError, check_layout_early, load_recipe
from hybrid3d.config.schema import FilePath, read_value, shortened
from hybrid3d.errors import UserMistake, visible
from hybrid3d.launch_environment import CHECKED
from hybrid3d.run.run_folder import RunFolder

if TYPE_CHECKING:
    from rich.console import Console

    from hybrid3d.launch.worker import Task

DONE, FAILED, MISTAKE = 0, 1, 2

PICTURES = (".png", ".svg", ".pdf")
# Of what a benchmark measures: more than any model has, and few enough to be counted through
MOST_MEASURED = {"layers": 1_000, "hidden": 65_536, "experts": 4_096, "repeats": 10_000}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. What is heavy (torch, both engines) is imported by the command that needs it, and late."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    options = _parse(arguments)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a recipe's paths are local: nothing is looked up elsewhere
    try:
        launch_environment.check()
    except UserMistake as error:  # then nothing is known of other ranks, either
        _say_mistake(error)
        return MISTAKE
    if launch_environment.under_launcher():
        try:
            launch_environment.master()
        except UserMistake as error:  # nor can they be reached: each node says so
            if launch_environment.local_rank() == 0:
                _say_mistake(error)
            return MISTAKE
    try:
        return int(options.run(options, arguments))
    except UserMistake as error:
        if launch_environment.under_launcher() and launch_environment.rank() > 0:
            from hybrid3d.launch import rendezvous

            rendezvous.report(str(error))  # rank 0 says it, once
        else:
            _say_mistake(error)
        return MISTAKE


def _say_mistake(error: UserMistake) -> None:
    _console(stderr=True).print(str(error), style="red", soft_wrap=True)


def _console(stderr: bool = False) -> Console:
    from hybrid3d.run import terminal

    return terminal.console(stderr=stderr)


class _Parser(argparse.ArgumentParser):
    """argparse, which prints what it was given as it stands, escape sequences included."""

    def error(self, message: str) -> NoReturn:
        super().error(visible(message))


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


def _parser() -> _Parser:
    parser = _Parser(prog="hybrid3d", description=__doc__.split("\n")[0])
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
        check_layout_early(recipe)
        from hybrid3d.launch.launcher import check_devices
        from hybrid3d.launch.preflight import check_run
        from hybrid3d.run.live_settings import check_schedule

        if not launch_environment.under_launcher():
            check_devices(recipe)
        check_run(recipe)
        check_schedule(recipe)
    console = _console()
    if launch_environment.under_launcher():
        from hybrid3d.launch import tasks

        alone = CHECKED not in os.environ and launch_environment.rank() == 0
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
        from hybrid3d.launch.preflight import check_evaluation

        check_evaluation(recipe, folder, step)
    if not launch_environment.under_launcher():
        return _launch(arguments, recipe, folder, _console())
    from hybrid3d.launch import tasks

    return _run_rank(recipe, folder, functools.partial(tasks.evaluate, recipe, folder, step))


def _export(options: argparse.Namespace, arguments: list[str]) -> int:
    out = _path(options.out, "OUT")
    recipe, folder, step = _finished(options, "export")
    from hybrid3d.inputs.export import UNFINISHED, unfinished_folder

    if CHECKED not in os.environ:
        from hybrid3d.launch.preflight import check_export

        check_export(recipe, folder, step, out)
    if not launch_environment.under_launcher():
        with unfinished_folder(out) as unfinished, mock.patch.dict(os.environ, {UNFINISHED: str(unfinished)}):
            return _launch(arguments, recipe, folder, _console(), generates=False)
    from hybrid3d.launch import tasks

    return _run_rank(recipe, folder, functools.partial(tasks.export, recipe, folder, step, out))


def _plan(options: argparse.Namespace, arguments: list[str]) -> int:
    recipe = load_recipe(options.recipe, options.overrides)
    if recipe.rollout is None:
        raise RecipeError(recipe.name, ["the recipe has no `rollout` section: there is no sync to plan"])
    picture = None if options.picture is None else _picture(options.picture)
    check_layout_early(recipe)
    from hybrid3d.inputs.checks import check_model

    config = check_model(recipe, planned=True)
    from hybrid3d.planning.page import draw, format_page
    from hybrid3d.planning.report import make_report

    with _console(stderr=True).status("") as status:
        found = make_report(recipe, config, on_progress=status.update)
    if options.json:
        print(json.dumps(found.numbers(), indent=2))
    else:
        _console().print(format_page(found))
    if picture is not None:
        try:
            draw(found, picture)
        except OSError as error:
            _console(stderr=True).print(f"{picture} cannot be written: {error.strerror}", style="red", soft_wrap=True)
            return FAILED
    return DONE


def _picture(text: str) -> Path:
    """The file that `--picture` names, known to be writable before the plan is made."""
    path, option = _path(text, "--picture"), f"--picture {text}"
    if path.suffix.lower() not in PICTURES:
        raise RecipeError(option, [f"the name ends in {path.suffix!r}: end it in {', '.join(PICTURES)}"])
    if path.is_dir() or not path.parent.is_dir():
        problem = "it is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise RecipeError(option, [f"{problem}: name a file in a folder that exists"])
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise RecipeError(option, ["it cannot be written: name a file in a folder that can be"])
    return path


def _path(text: str, option: str) -> Path:
    """A path from the command line. RecipeError: no file can have it."""
    try:
        return Path(read_value(FilePath, text))
    except ValueError as error:
        raise RecipeError(option, [str(error)]) from None


def _bench(options: argparse.Namespace, arguments: list[str]) -> int:
    recipe = load_recipe(options.recipe, options.overrides)
    for name, most in MOST_MEASURED.items():
        value = getattr(options, name)
        if value is not None and not 1 <= value <= most:
            problem = f"--{name} {shortened(value)}: expected an integer from 1 to {most:,}"
            raise RecipeError(recipe.name, [problem])
    from hybrid3d.bench.scaling import Scale, scale_recipe
    from hybrid3d.inputs.models import read_config
    from hybrid3d.launch import tasks

    scale = Scale(options.layers, options.hidden, options.experts)
    smaller, config = scale_recipe(recipe, scale)
    said = scale.describe(read_config(recipe.model.path))
    folder = RunFolder.of(smaller)
    if launch_environment.under_launcher():
        _check_world(smaller)
    if CHECKED not in os.environ:
        from hybrid3d.bench.fitting import check_benchmark_memory

        check_benchmark_memory(smaller, config)
    if launch_environment.under_launcher():
        task = functools.partial(tasks.bench, smaller, config, said, folder, options.repeats, options.json)
        return _run_rank(smaller, folder, task)
    return _launch(arguments, smaller, folder, _console(stderr=options.json))


def _finished(options: argparse.Namespace, command: str) -> tuple[Recipe, RunFolder, int]:
    """A run's recipe, its folder with this command's logs, and the checkpoint asked for."""
    from hybrid3d.run.run_folder import find_step

    folder = RunFolder(_path(options.folder, "RUN")).logging_to(command)
    folder.check()
    if not folder.recipe.exists():
        raise RecipeError(str(folder.path), ["no run's folder: it has no recipe.yaml"])
    recipe = load_recipe(folder.recipe)
    if CHECKED not in os.environ:
        check_layout_early(recipe)
        from hybrid3d.inputs.checks import check_model

        check_model(recipe)
    return recipe, folder, find_step(folder, options.step)


def _held(folder: RunFolder) -> AbstractContextManager[None]:
    """The folder of a run for this start alone."""
    return folder.held(functools.partial(_console(stderr=True).print, soft_wrap=True))


def _run_rank(
    recipe: Recipe, folder: RunFolder, task: Task, holding: AbstractContextManager[None] | None = None
) -> int:
    from hybrid3d.launch.worker import run_rank

    _check_world(recipe)
    with holding or nullcontext():
        return run_rank(recipe, folder, task, launched=CHECKED in os.environ)


def _check_world(recipe: Recipe) -> None:
    """An external launcher must have started as many ranks as the recipe's layout has, each with its GPU."""
    from hybrid3d.launch.launcher import check_node

    started = launch_environment.world_size()
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
    generates: bool = True,
) -> int:
    from hybrid3d.launch.launcher import check_devices, launch

    check_devices(recipe, generates)
    with holding or nullcontext(), mock.patch.dict(os.environ, {CHECKED: "1"}):
        return launch(arguments, recipe.world_size, folder, console)


def _say_where(recipe: Recipe, folder: RunFolder, console: Console) -> None:
    from hybrid3d.run.run_folder import checkpoint_folder, steps_in

    last = checkpoint_folder(folder, steps_in(folder)[-1])
    told = [f"\ncheckpoint  {last}", f"metrics     {folder.metrics}", f"curves      {folder.curves}"]
    command = os.path.relpath(Path(sys.executable).with_name("hybrid3d"))
    if recipe.rollout is not None:
        told.append(f"evaluate    {command} eval {folder.path}")
    told.append(f"export      {command} export {folder.path} OUT")
    console.print("\n".join(told), soft_wrap=True)
