"""The command line: `hybrid3d train | eval | export | plan | bench | doctor`.

Exit codes: 0 for success, 1 if the run failed, 2 for a mistake of the user, which is found before ranks start.
"""

from __future__ import annotations

import argparse
import dataclasses
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
from hybrid3d.config import Recipe, RecipeError, RoleRanks, check_layout_early, load_recipe
from hybrid3d.config.schema import FilePath, abbreviate, read_value
from hybrid3d.errors import UserMistake, escape_control_characters
from hybrid3d.launch.device_connections import set_device_connections
from hybrid3d.launch_environment import CHECKED
from hybrid3d.run.run_folder import RunFolder

if TYPE_CHECKING:
    from rich.console import Console

    from hybrid3d.launch.worker import Task

DONE, FAILED, MISTAKE = 0, 1, 2

PICTURES = (".png", ".svg", ".pdf")
# Upper limits of the options of `bench`: larger than any model, and small enough to compute with
MAX_BENCH_OPTIONS = {"layers": 1_000, "hidden": 65_536, "experts": 4_096, "repeats": 10_000}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code. Each command imports torch and the engines only when it needs them."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    options = _parse(arguments)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a recipe's paths are local, so nothing must be downloaded
    try:
        launch_environment.validate()
    except UserMistake as error:  # other ranks are unknown too, so each rank prints its own error
        _print_mistake(error)
        return MISTAKE
    if launch_environment.under_launcher():
        try:
            launch_environment.master_address()
        except UserMistake as error:  # rank 0 cannot be reached, so each node prints the error
            if launch_environment.local_rank() == 0:
                _print_mistake(error)
            return MISTAKE
    try:
        return int(options.run(options, arguments))
    except UserMistake as error:
        if launch_environment.under_launcher() and launch_environment.rank() > 0:
            from hybrid3d.launch import rendezvous

            rendezvous.report(str(error))  # rank 0 prints it once
        else:
            _print_mistake(error)
        return MISTAKE


def _print_mistake(error: UserMistake) -> None:
    _console(stderr=True).print(str(error), style="red", soft_wrap=True)


def _console(stderr: bool = False) -> Console:
    from hybrid3d.run import terminal

    return terminal.plain_console(stderr=stderr)


class _Parser(argparse.ArgumentParser):
    """Escapes control characters in argparse's messages, which contain the arguments literally."""

    def error(self, message: str) -> NoReturn:
        super().error(escape_control_characters(message))


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments, allowing settings after options, which argparse alone does not."""
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
    train.add_argument("overrides", nargs="*", metavar="key=value", help="settings that override the recipe's")
    train.add_argument("--ray", metavar="ADDRESS", help="start the ranks on a Ray cluster: host:port, auto or local")
    train.set_defaults(run=_train)

    evaluate = commands.add_parser("eval", help="measure the held-out accuracy of a run's checkpoint")
    evaluate.add_argument("folder", metavar="RUN", help="a run's folder")
    evaluate.add_argument("--step", type=int, help="the checkpoint after this many updates (default: the last)")
    evaluate.set_defaults(run=_evaluate)

    export = commands.add_parser("export", help="write a run's checkpoint as a Hugging Face checkpoint")
    export.add_argument("folder", metavar="RUN", help="a run's folder")
    export.add_argument("out", metavar="OUT", help="the folder to write")
    export.add_argument("--step", type=int, help="the checkpoint after this many updates (default: the last)")
    export.set_defaults(run=_export)

    plan = commands.add_parser("plan", help="compute what each sync of a recipe will transfer, without starting ranks")
    plan.add_argument("recipe", help="a recipe's YAML file")
    plan.add_argument("overrides", nargs="*", metavar="key=value", help="settings that override the recipe's")
    plan.add_argument("--json", action="store_true", help="print the numbers as JSON")
    plan.add_argument("--changed", metavar="P", type=float, help="also predict a sync of this fraction of all elements")
    plan.add_argument("--picture", metavar="FILE", help="draw the traffic between ranks, as PNG, SVG or PDF")
    plan.set_defaults(run=_plan)

    bench = commands.add_parser("bench", help="time a recipe's sync, other trainers' method and the network itself")
    bench.add_argument("recipe", help="a recipe's YAML file")
    bench.add_argument("overrides", nargs="*", metavar="key=value", help="settings that override the recipe's")
    bench.add_argument("--repeats", type=int, default=15, help="timed runs of each method (default: 15)")
    bench.add_argument("--layers", type=int, help="number of layers of the measured model")
    bench.add_argument("--hidden", type=int, help="hidden size of the measured model; heads, MLPs and vocabulary scale")
    bench.add_argument("--experts", type=int, help="number of routed experts of the measured model")
    bench.add_argument("--changed", metavar="P", type=float, help="also time syncs of this fraction of all elements")
    bench.add_argument("--json", action="store_true", help="print the numbers as JSON")
    bench.set_defaults(run=_bench)

    doctor = commands.add_parser("doctor", help="check what this machine's GPU and packages do, in 20 minutes or less")
    doctor.add_argument("--gpu", action="store_true", required=True, help="run the checks for GPUs")
    doctor.add_argument("--only", action="append", default=[], metavar="NAME", help="run this check; may be repeated")
    doctor.add_argument("--json", metavar="OUT", help="also write the results to this file, after each check")
    doctor.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a stand-in run without a GPU")
    doctor.set_defaults(run=_doctor)
    return parser


def _train(options: argparse.Namespace, arguments: list[str]) -> int:
    recipe = load_recipe(options.recipe, options.overrides)
    set_device_connections(recipe)
    folder = RunFolder.for_recipe(recipe)
    if CHECKED not in os.environ:
        check_layout_early(recipe)
        from hybrid3d.launch.launcher import check_devices
        from hybrid3d.launch.preflight import check_ray, check_run
        from hybrid3d.run.live_settings import check_schedule

        if options.ray is not None:
            check_ray(recipe)
        elif not launch_environment.under_launcher():
            check_devices(recipe)
        check_run(recipe)
        check_schedule(recipe)
    console = _console()
    if launch_environment.under_launcher():
        from hybrid3d.launch import tasks

        must_lock = CHECKED not in os.environ and launch_environment.rank() == 0  # our own launcher holds the lock
        task = functools.partial(tasks.train, recipe, folder)
        return _run_rank(recipe, folder, task, _lock(folder) if must_lock else None, restarts=True)
    if options.ray is not None:
        from hybrid3d.launch.ray_cluster import launch_on_ray

        with _lock(folder):
            code = launch_on_ray(arguments, recipe, folder, console, options.ray)
    else:
        code = _launch(arguments, recipe, folder, console, _lock(folder), max_restarts=recipe.run.max_restarts)
    if code == DONE:
        _print_results(recipe, folder, console)
    return code


def _evaluate(options: argparse.Namespace, arguments: list[str]) -> int:
    recipe, folder, step = _load_run(options, "eval")
    if recipe.rollout is None:
        raise RecipeError(recipe.name, ["the run has no `rollout` section, which `eval` needs to generate answers"])
    if CHECKED not in os.environ:
        from hybrid3d.launch.preflight import check_evaluation

        check_evaluation(recipe, folder, step)
    if not launch_environment.under_launcher():
        return _launch(arguments, recipe, folder, _console())
    from hybrid3d.launch import tasks

    recipe = dataclasses.replace(recipe, run=dataclasses.replace(recipe.run, max_restarts=0))
    return _run_rank(recipe, folder, functools.partial(tasks.evaluate, recipe, folder, step), restarts=True)


def _export(options: argparse.Namespace, arguments: list[str]) -> int:
    out = _path(options.out, "OUT")
    recipe, folder, step = _load_run(options, "export")
    recipe = dataclasses.replace(recipe, roles=RoleRanks())  # the ranks that train hold all weights
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
    if options.changed is not None and not 0 < options.changed <= 1:
        raise RecipeError(recipe.name, [f"--changed {options.changed}: expected a fraction above 0 and up to 1"])
    picture = None if options.picture is None else _picture_path(options.picture)
    check_layout_early(recipe)
    from hybrid3d.inputs.checks import check_model

    config = check_model(recipe, planned=True)
    from hybrid3d.planning.page import draw, format_page
    from hybrid3d.planning.report import make_report

    with _console(stderr=True).status("") as status:
        plan = make_report(recipe, config, on_progress=status.update, changed_fraction=options.changed)
    if options.json:
        print(json.dumps(plan.numbers(), indent=2))
    else:
        _console().print(format_page(plan))
    if picture is not None:
        try:
            draw(plan, picture)
        except OSError as error:
            _console(stderr=True).print(f"{picture} cannot be written: {error.strerror}", style="red", soft_wrap=True)
            return FAILED
    return DONE


def _picture_path(text: str) -> Path:
    """Return the file of `--picture`, after checking that it is writable, because planning takes time.

    Raises:
        RecipeError: the file cannot be written.
    """
    path, option = _path(text, "--picture"), f"--picture {text}"
    if path.suffix.lower() not in PICTURES:
        raise RecipeError(option, [f"unknown file name extension {path.suffix!r}: use {', '.join(PICTURES)}"])
    if path.is_dir() or not path.parent.is_dir():
        problem = "it is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise RecipeError(option, [f"{problem}: name a file in a folder that exists"])
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise RecipeError(option, ["the file cannot be written: name a file in a writable folder"])
    return path


def _path(text: str, option: str) -> Path:
    """Return a path from the command line.

    Raises:
        RecipeError: it is not a valid path.
    """
    try:
        return Path(read_value(FilePath, text))
    except ValueError as error:
        raise RecipeError(option, [str(error)]) from None


def _bench(options: argparse.Namespace, arguments: list[str]) -> int:
    recipe = load_recipe(options.recipe, options.overrides)
    for name, maximum in MAX_BENCH_OPTIONS.items():
        value = getattr(options, name)
        if value is not None and not 1 <= value <= maximum:
            problem = f"--{name} {abbreviate(value)}: expected an integer from 1 to {maximum:,}"
            raise RecipeError(recipe.name, [problem])
    set_device_connections(recipe)
    from hybrid3d.bench.scaling import Scale, scale_recipe
    from hybrid3d.inputs.models import read_config
    from hybrid3d.launch import tasks

    scale = Scale(options.layers, options.hidden, options.experts)
    scaled_recipe, config = scale_recipe(recipe, scale, options.changed)
    scaling = scale.describe(read_config(recipe.model.path))
    folder = RunFolder.for_recipe(scaled_recipe)
    if launch_environment.under_launcher():
        _check_world(scaled_recipe)
    if CHECKED not in os.environ:
        from hybrid3d.bench.fitting import check_benchmark_memory

        launch_environment.check_vllm_variables()
        check_benchmark_memory(scaled_recipe, config, options.changed)
    if launch_environment.under_launcher():
        more = (options.repeats, options.changed, options.json)
        return _run_rank(
            scaled_recipe, folder, functools.partial(tasks.bench, scaled_recipe, config, scaling, folder, *more)
        )
    return _launch(arguments, scaled_recipe, folder, _console(stderr=options.json))


def _doctor(options: argparse.Namespace, arguments: list[str]) -> int:
    from hybrid3d.doctor.runner import run_checks
    from hybrid3d.doctor.table import GPU_CHECKS

    names = [check.name for check in GPU_CHECKS]
    unknown = [name for name in options.only if name not in names]
    if unknown:
        raise UserMistake(f"--only {unknown[0]}: there is no such check; there are {', '.join(names)}")
    out = None if options.json is None else _path(options.json, "--json")
    if out is not None and (out.is_dir() or not out.parent.is_dir()):
        raise UserMistake(f"--json {options.json}: name a file in a folder that exists")
    selected = [check for check in GPU_CHECKS if not options.only or check.name in options.only]
    return run_checks(selected, options.device, out)


def _load_run(options: argparse.Namespace, command: str) -> tuple[Recipe, RunFolder, int]:
    """Return a run's recipe, its folder with the logs of this command, and the requested checkpoint step."""
    from hybrid3d.run.run_folder import find_checkpoint_step

    folder = RunFolder(_path(options.folder, "RUN")).with_logs_in(command)
    folder.check()
    if not folder.recipe.exists():
        raise RecipeError(str(folder.path), ["not the folder of a run: it has no recipe.yaml"])
    recipe = load_recipe(folder.recipe)
    if CHECKED not in os.environ:
        check_layout_early(recipe)
        from hybrid3d.inputs.checks import check_model

        check_model(recipe)
    return recipe, folder, find_checkpoint_step(folder, options.step)


def _lock(folder: RunFolder) -> AbstractContextManager[None]:
    """Lock the folder of a run, printing a message to stderr while waiting."""
    return folder.lock(functools.partial(_console(stderr=True).print, soft_wrap=True))


def _run_rank(
    recipe: Recipe,
    folder: RunFolder,
    task: Task,
    lock: AbstractContextManager[None] | None = None,
    restarts: bool = False,
) -> int:
    """Run a task as this rank, holding the lock if given, and return the exit code."""
    from hybrid3d.launch.rank import run_rank

    _check_world(recipe)
    with lock or nullcontext():
        return run_rank(recipe, folder, task, CHECKED in os.environ, restarts)


def _check_world(recipe: Recipe) -> None:
    """Check that the external launcher has started as many ranks as the recipe's layout has, each with a GPU.

    Raises:
        RecipeError: it has not.
    """
    from hybrid3d.launch.launcher import check_node

    started = launch_environment.world_size()
    if started != recipe.world_size:
        problem = f"{recipe.ranks_formula} = {recipe.world_size} ranks, but the launcher started {started}"
        raise RecipeError(recipe.name, [f"{problem}: start {recipe.world_size}, or set train.dp"])
    check_node(recipe)


def _launch(
    arguments: list[str],
    recipe: Recipe,
    folder: RunFolder,
    console: Console,
    lock: AbstractContextManager[None] | None = None,
    generates: bool = True,
    max_restarts: int = 0,
) -> int:
    """Run a command as all ranks on this machine, holding the lock if given, and return the exit code."""
    from hybrid3d.launch.launcher import check_devices, launch

    check_devices(recipe, generates)
    with lock or nullcontext(), mock.patch.dict(os.environ, {CHECKED: "1"}):
        return launch(arguments, recipe.world_size, folder, console, max_restarts)


def _print_results(recipe: Recipe, folder: RunFolder, console: Console) -> None:
    """Print the paths of a finished run's results, and the commands to evaluate and export it."""
    from hybrid3d.run.run_folder import checkpoint_folder, checkpoint_steps

    last = checkpoint_folder(folder, checkpoint_steps(folder)[-1])
    lines = [f"\ncheckpoint  {last}", f"metrics     {folder.metrics}", f"curves      {folder.curves}"]
    command = os.path.relpath(Path(sys.executable).with_name("hybrid3d"))
    if recipe.rollout is not None:
        lines.append(f"evaluate    {command} eval {folder.path}")
    lines.append(f"export      {command} export {folder.path} OUT")
    console.print("\n".join(lines), soft_wrap=True)
