"""`hybrid3d doctor`: check what this machine's GPU and packages do, in 20 minutes or less."""

from __future__ import annotations

import argparse

from hybrid3d.cli.terminal import Commands, path_argument
from hybrid3d.errors import UserMistake


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser("doctor", help="check what this machine's GPU and packages do, in 20 minutes or less")
    parser.add_argument("--gpu", action="store_true", required=True, help="run the checks for GPUs")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="run this check; may be repeated")
    parser.add_argument("--json", metavar="OUT", help="also write the results to this file, after each check")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a stand-in run without a GPU")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace, arguments: list[str]) -> int:
    from hybrid3d.doctor.runner import run_checks
    from hybrid3d.doctor.table import GPU_CHECKS

    names = [check.name for check in GPU_CHECKS]
    unknown = [name for name in options.only if name not in names]
    if unknown:
        raise UserMistake(f"--only {unknown[0]}: there is no such check; there are {', '.join(names)}")
    out = None if options.json is None else path_argument(options.json, "--json")
    if out is not None and (out.is_dir() or not out.parent.is_dir()):
        raise UserMistake(f"--json {options.json}: name a file in a folder that exists")
    selected = [check for check in GPU_CHECKS if not options.only or check.name in options.only]
    return run_checks(selected, options.device, out)
