"""`hybrid3d certify`: prove that this pair of engines carries a model's weights bit for bit, or name what does not.

With `--touch-points`, compare the sources of engines with what hybrid3d uses of them (`touch_points.py`).
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
from dataclasses import replace
from typing import TYPE_CHECKING

from hybrid3d import launch_environment
from hybrid3d.cli import touch_points
from hybrid3d.cli.starting import check_world, launch_ranks, lock_run, run_as_judging_rank, set_device_connections
from hybrid3d.cli.terminal import DONE, FAILED, Commands, make_console, path_argument
from hybrid3d.config import Recipe, RecipeError, check_layout_early, read_recipe
from hybrid3d.config.overrides import apply_overrides
from hybrid3d.errors import UserMistake
from hybrid3d.launch_environment import CHECKED
from hybrid3d.run.folder import RunFolder

if TYPE_CHECKING:
    from hybrid3d.certify.task import Subject

MAX_ROUNDS = 1_000
MAX_MODEL_LEN = 288  # tokens of the longest prompt and its answer: two blocks of the prefix cache on a CPU


def add_parser(commands: Commands) -> None:
    about = "prove that these engines carry a model's weights bit for bit, or name the tensor that is wrong"
    parser = commands.add_parser("certify", help=about)
    model_help = "a checkpoint's folder; without weights a tiny one is made"
    parser.add_argument("model", nargs="?", metavar="MODEL", help=model_help)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="layouts, as in train.tp=2 rollout.tp=2")
    parser.add_argument("--tiny", action="store_true", help="use a tiny checkpoint of the same config")
    parser.add_argument("--rounds", type=int, default=10, help="syncs with changed weights (default: 10)")
    parser.add_argument("--json", action="store_true", help="print the certificate as JSON")
    touch_help = "instead, find what hybrid3d uses of the installed engines, or of those in folders and wheels"
    parser.add_argument("--touch-points", nargs="*", metavar="PLACE", help=touch_help)
    parser.add_argument(
        "--record", action="store_true", help="with --touch-points: write the records of these versions"
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace, arguments: list[str]) -> int:
    if options.touch_points is not None:
        places = [*options.touch_points, *([options.model] if options.model else []), *options.overrides]
        return touch_points.run(places, options.json, options.record)
    recipe, folder, subject = _prepare(options)
    if not launch_environment.under_launcher():
        set_device_connections(recipe)
        launch_environment.check_vllm_variables()
        code = launch_ranks(arguments, recipe, folder, make_console(stderr=options.json), lock_run(folder))
        return code if code != DONE or _is_proven(folder) else FAILED
    check_world(recipe)
    from hybrid3d.certify.task import certify

    task = functools.partial(certify, recipe, folder, subject, options.rounds, options.json)
    return run_as_judging_rank(recipe, folder, task)


def _prepare(options: argparse.Namespace) -> tuple[Recipe, RunFolder, Subject]:
    """Return the recipe of the certification, its folder, and what is certified.

    Raises:
        UserMistake: the model or a setting cannot be used.
    """
    if options.model is None:
        raise UserMistake("name MODEL, a checkpoint's folder, or --touch-points")
    if options.record:
        raise UserMistake("--record belongs to --touch-points: add it, or leave this out")
    if not 1 <= options.rounds <= MAX_ROUNDS:
        raise RecipeError("certify", [f"--rounds {options.rounds}: expected an integer from 1 to {MAX_ROUNDS:,}"])
    model = path_argument(options.model, "MODEL")
    warnings = touch_points.check_engines()
    from hybrid3d.certify.task import Subject, raw_recipe
    from hybrid3d.certify.tiny_models import shrunk, write_config
    from hybrid3d.inputs.checks import check_model
    from hybrid3d.inputs.models import read_config

    config = read_config(model)
    name = "certify-" + (re.sub(r"[^\w.-]", "-", model.resolve().name) or "model")
    raw = raw_recipe(name, str(model), min(MAX_MODEL_LEN, config["max_position_embeddings"]))
    for setting in options.overrides:
        if setting.startswith("roles."):
            raise RecipeError(name, [f"{setting}: here each rank has both engines: leave it out"])
    problems: list[str] = []
    apply_overrides(raw, options.overrides, problems)
    recipe = read_recipe(raw, name, problems)
    folder = RunFolder.for_recipe(recipe)
    tiny = None
    if options.tiny or not any(model.glob("*.safetensors")):
        tiny = shrunk(config, recipe.train.pp * recipe.train.vpp)
        recipe = replace(recipe, model=replace(recipe.model, path=str(folder.path / "model")))
    first = not launch_environment.under_launcher() or launch_environment.rank() == 0
    if CHECKED not in os.environ and first:
        folder.check()
        if tiny is not None:
            write_config(folder.path / "model", tiny)
        check_layout_early(recipe)
        check_model(recipe)
    touch_points.print_warnings(warnings)
    return recipe, folder, Subject(options.model, tiny)


def _is_proven(folder: RunFolder) -> bool:
    from hybrid3d.certify.task import RESULT

    return bool(json.loads((folder.path / RESULT).read_text(encoding="utf-8"))["proven"])
