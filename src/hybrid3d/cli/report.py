"""`hybrid3d report`: write a page about a run, or about two runs side by side."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from hybrid3d.cli.plan import make_plan
from hybrid3d.cli.terminal import DONE, Commands, make_console, path_argument, why_unwritable
from hybrid3d.config import RecipeError, load_recipe


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser("report", help="write an HTML page about a run, or about two side by side")
    parser.add_argument("folder", metavar="RUN", help="a run's folder; the run may still be going on")
    parser.add_argument("other", metavar="RUN", nargs="?", help="the folder of a run to compare it with")
    parser.add_argument("--out", metavar="FILE", help="the page (default: report.html in the first run's folder)")
    parser.add_argument(
        "--plan", action="store_true", help="also compute the plan of each run's sync and memory, which takes a while"
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace, arguments: list[str]) -> int:
    from hybrid3d.report.page import SAMPLES_BYTES, make_page
    from hybrid3d.report.run_data import read_run, select_samples

    folders = [path_argument(text, "RUN") for text in (options.folder, options.other) if text is not None]
    runs = [read_run(folder) for folder in folders]
    out = path_argument(options.out, "--out") if options.out else folders[0] / "report.html"
    problem = why_unwritable(out)
    if problem:
        raise _unwritable(out, problem)
    plans = [_plan(folder) if options.plan else None for folder in folders]
    samples = [select_samples(folder / "samples.jsonl", SAMPLES_BYTES // len(folders)) for folder in folders]
    page = make_page(runs, samples, plans)
    try:
        out.write_bytes(page.encode("utf-8", "replace"))
    except OSError as error:
        raise _unwritable(out, str(error.strerror)) from None
    make_console().print(f"wrote {out}", soft_wrap=True)
    return DONE


def _plan(folder: Path) -> dict[str, Any] | None:
    """Return the numbers of the plan of a run; None if it has no rollout."""
    recipe = load_recipe(folder / "recipe.yaml")
    if recipe.rollout is None:
        return None
    with make_console(stderr=True).status("") as status:
        return make_plan(recipe, status.update).numbers()


def _unwritable(out: Path, why: str) -> RecipeError:
    return RecipeError(str(out), [f"the page cannot be written ({why}): name another file with --out"])
