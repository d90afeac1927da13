"""`hybrid3d doctor`: examine this machine, and whether a recipe's run can start on it."""

from __future__ import annotations

import argparse
import functools
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hybrid3d import launch_environment
from hybrid3d.cli.starting import run_as_rank
from hybrid3d.cli.terminal import DONE, FAILED, Commands, make_console
from hybrid3d.config import Recipe, load_recipe
from hybrid3d.errors import UserMistake
from hybrid3d.launch_environment import CHECKED
from hybrid3d.run.folder import RunFolder

if TYPE_CHECKING:
    from hybrid3d.doctor.page import Examination

STDOUT = ""  # the value of --json without a word after it


def add_parser(commands: Commands) -> None:
    about = "examine this machine, whether a recipe's run can start on it, and how fast its process groups are"
    parser = commands.add_parser("doctor", help=about)
    parser.add_argument("recipe", nargs="?", help="a recipe's YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that override the recipe's")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="only this check; may be repeated")
    parser.add_argument("--json", nargs="?", const=STDOUT, metavar="RECIPE", help="print the findings as JSON")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace, arguments: list[str]) -> int:
    recipe = _read_recipe(options)
    if launch_environment.under_launcher():
        return _examine_as_rank(recipe, options)
    from hybrid3d.doctor.page import can_start, examine, print_page

    selected = _selected(options.only)
    with make_console(stderr=True).status("") as status:
        subjects = list(examine(recipe, selected, status.update))
    print_page(make_console(), recipe, subjects, options.json is not None)
    return DONE if can_start(subjects) else FAILED


def _selected(only: Sequence[str]) -> list[Examination]:
    """Return the examinations of these subjects, in their order; all of them if there are no names."""
    from hybrid3d.doctor.page import EXAMINATIONS

    subjects = [one.subject for one in EXAMINATIONS]
    unknown = [name for name in only if name not in subjects]
    if unknown:
        raise UserMistake(f"--only {unknown[0]}: there is no such check; there are {', '.join(subjects)}")
    return [one for one in EXAMINATIONS if not only or one.subject in only]


def _read_recipe(options: argparse.Namespace) -> Recipe | None:
    """Return the recipe; it and its settings may follow --json, as they may for other commands."""
    words = [word for word in (options.recipe, *options.overrides, options.json) if word]
    files = [word for word in words if "=" not in word]
    settings = [word for word in words if "=" in word]
    if len(files) > 1:
        raise UserMistake(f"{' and '.join(files)}: expected one recipe; its settings are key=value")
    if settings and not files:
        raise UserMistake(f"{settings[0]}: settings need the recipe that they belong to")
    return load_recipe(files[0], settings) if files else None


def _examine_as_rank(recipe: Recipe | None, options: argparse.Namespace) -> int:
    """Measure the process groups as one of the ranks; those of torchrun and srun also examine their nodes."""
    if recipe is None:
        raise UserMistake("name the recipe whose ranks these are, or run doctor once, without torchrun or srun")
    if recipe.roles.reward.ranks is not None:
        problem = f"roles.reward.ranks={recipe.roles.reward.ranks}: only ranks that train or generate are examined"
        raise UserMistake(f"{problem} under torchrun and srun: start those, with roles.reward.ranks=null")
    from hybrid3d.doctor.groups import measure_groups

    if CHECKED in os.environ:  # started by the examination of one machine
        folder = RunFolder.for_recipe(recipe)
        return run_as_rank(recipe, folder, functools.partial(measure_groups, recipe, folder))
    from hybrid3d.doctor.page import NodesExamination

    selected = _selected(options.only)
    nodes = NodesExamination(recipe, selected, options.json is not None)
    name = f"hybrid3d-doctor-{os.getuid()}-{launch_environment.run_id()}"
    folder = RunFolder(Path(tempfile.gettempdir()) / name)
    code = run_as_rank(recipe, folder, functools.partial(nodes.run, folder))
    if code == DONE and launch_environment.local_rank() == 0:  # else the ranks' logs say why
        shutil.rmtree(folder.path, ignore_errors=True)
    return code or (DONE if nodes.can_start else FAILED)
