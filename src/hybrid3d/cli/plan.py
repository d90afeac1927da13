"""`hybrid3d plan`: compute what each sync of a recipe will transfer, without starting ranks."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from hybrid3d.cli.terminal import DONE, FAILED, Commands, add_recipe, make_console, path_argument, why_unwritable
from hybrid3d.config import Recipe, RecipeError, check_layout_early, load_recipe

if TYPE_CHECKING:
    from hybrid3d.planning.engine_queries import ProgressCallback
    from hybrid3d.planning.report import PlanReport

PICTURES = (".png", ".svg", ".pdf")


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser(
        "plan", help="compute what each sync of a recipe will transfer, without starting ranks"
    )
    add_recipe(parser)
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    parser.add_argument(
        "--changed", metavar="P", type=float, help="also predict a sync of this fraction of all elements"
    )
    parser.add_argument("--picture", metavar="FILE", help="draw the traffic between ranks, as PNG, SVG or PDF")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace, arguments: list[str]) -> int:
    recipe = load_recipe(options.recipe, options.overrides)
    if recipe.rollout is None:
        raise RecipeError(recipe.name, ["the recipe has no `rollout` section: there is no sync to plan"])
    if options.changed is not None and not 0 < options.changed <= 1:
        raise RecipeError(recipe.name, [f"--changed {options.changed}: expected a fraction above 0 and up to 1"])
    if options.changed is not None and recipe.lora is not None:
        problem = f"--changed {options.changed}: with adapters (lora) syncs of changed elements are not predicted"
        raise RecipeError(recipe.name, [f"{problem}: leave one out"])
    picture = None if options.picture is None else _picture_path(options.picture)
    with make_console(stderr=True).status("") as status:
        plan = make_plan(recipe, status.update, options.changed)
    if options.json:
        print(json.dumps(plan.numbers(), indent=2))
    else:
        from hybrid3d.planning.page import format_page

        make_console().print(format_page(plan))
    if picture is not None:
        from hybrid3d.planning.page import draw

        try:
            draw(plan, picture)
        except OSError as error:
            make_console(stderr=True).print(
                f"{picture} cannot be written: {error.strerror}", style="red", soft_wrap=True
            )
            return FAILED
    return DONE


def make_plan(recipe: Recipe, on_progress: ProgressCallback, changed_fraction: float | None = None) -> PlanReport:
    """Check a recipe's layout and model, and plan its sync and its memory.

    Raises:
        RecipeError: the recipe cannot run, or does not fit the machine.
    """
    check_layout_early(recipe)
    from hybrid3d.inputs.checks import check_model

    config = check_model(recipe, planned=True)
    from hybrid3d.planning.report import make_report

    return make_report(recipe, config, on_progress=on_progress, changed_fraction=changed_fraction)


def _picture_path(text: str) -> Path:
    """Return the file of `--picture`; raise RecipeError if it is not writable, because planning takes time."""
    path, option = path_argument(text, "--picture"), f"--picture {text}"
    if path.suffix.lower() not in PICTURES:
        raise RecipeError(option, [f"unknown file name extension {path.suffix!r}: use {', '.join(PICTURES)}"])
    problem = why_unwritable(path)
    if problem:
        raise RecipeError(option, [f"the file cannot be written ({problem}): name a file in a writable folder"])
    return path
