"""`hybrid3d certify`: prove that this pair of engines carries a model's weights bit for bit, or name what does not.

With `--touch-points`, compare the sources of engines with what hybrid3d uses of them.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
from collections import Counter
from dataclasses import asdict, replace
from typing import Any

from hybrid3d import launch_environment
from hybrid3d.cli import starting
from hybrid3d.cli.terminal import DONE, FAILED, Commands, make_console, path_argument
from hybrid3d.config import Recipe, RecipeError, check_layout_early, read_recipe
from hybrid3d.config.load import apply_overrides
from hybrid3d.engines.compare import REFUSED, Report, compare_installed, compare_places, digest_of, write_record
from hybrid3d.errors import UserMistake
from hybrid3d.launch_environment import CHECKED
from hybrid3d.run.folder import RunFolder

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
        return _compare_touch_points(places, options.json, options.record)
    recipe, folder, tiny = _prepare(options)
    from hybrid3d.certify.task import RESULT, certify

    if not launch_environment.under_launcher():
        starting.set_device_connections(recipe)
        launch_environment.check_vllm_variables()
        console, lock = make_console(stderr=options.json), starting.lock_run(folder)
        code = starting.launch_ranks(arguments, recipe, folder, console, lock)
        return starting.failed_if_not("proven", folder.path / RESULT, code)
    starting.check_world(recipe)
    task = functools.partial(certify, recipe, folder, options.model, tiny, options.rounds, options.json)
    return starting.run_as_judging_rank(recipe, folder, task)


def _prepare(options: argparse.Namespace) -> tuple[Recipe, RunFolder, dict[str, Any] | None]:
    """Return the recipe of the certification, its folder, and the config of a tiny checkpoint if one is used.

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
    warnings = starting.check_engines()
    from hybrid3d.certify.task import raw_recipe
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
    starting.print_warnings(warnings)
    return recipe, folder, tiny


def _compare_touch_points(places: list[str], as_json: bool, record: bool) -> int:
    """Compare the engines in these folders and wheels, or the installed ones; return the exit code."""
    paths = [path_argument(place, "--touch-points") for place in places]
    reports = compare_places(paths) if paths else compare_installed()
    if not paths and all(report.copy.engine.package == "torch" for report in reports):
        raise UserMistake("neither megatron-core nor vllm is installed: name a folder or a wheel that has one")
    written = [str(write_record(report.touched)) for report in reports if record and not report.refused]
    if as_json:
        print(json.dumps(_summary(reports, written), indent=2))
    else:
        console = make_console()
        for line in (*(line for report in reports for line in _lines(report)), *written):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    return FAILED if any(report.refused for report in reports) else DONE


def _lines(report: Report) -> list[str]:
    compared = f"compared with the record of {report.baseline}" if report.baseline else "there is no record of it"
    counts = Counter(finding.problem for finding in report.findings)
    found = ", ".join(f"{count} {kind}" for kind, count in counts.items()) or "no difference"
    lines = [f"{report.copy} in {report.copy.place}: {report.names} names, {compared}: {found}"]
    lines += [f"  {text}" for text in (*report.copy.warnings, report.copy.note) if text]
    lines += [f"  cannot be read: {file}: {why}" for file, why in report.copy.tree.unreadable.items()]
    return [*lines, *(f"  {finding.problem}: {finding}" for finding in report.findings)]


def _summary(reports: list[Report], written: list[str]) -> dict[str, Any]:
    """Return the reports as JSON: `missing` and `changed` of all, and `engines` with each."""
    findings = [finding for report in reports for finding in report.findings]
    return {
        "missing": [finding.name for finding in findings if finding.problem in REFUSED],
        "changed": [finding.name for finding in findings if finding.problem not in REFUSED],
        "engines": [
            {
                "distribution": report.copy.distribution,
                "version": report.copy.version,
                "place": str(report.copy.place),
                "warnings": [text for text in (*report.copy.warnings, report.copy.note) if text],
                "unreadable": report.copy.tree.unreadable,
                "names": report.names,
                "baseline": report.baseline,
                "known": report.is_known,
                "digest": digest_of(report.touched),
                "findings": [asdict(finding) for finding in report.findings],
            }
            for report in reports
        ],
        "records": written,
    }
