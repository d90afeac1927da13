"""The command line, a module for each command.

`hybrid3d train | eval | export | plan | bench | doctor | certify | report | replay | serve`.

Exit codes: 0 for success, 1 if the run failed, 2 for a mistake of the user, which is found before ranks start.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from typing import NoReturn

from hybrid3d import __version__, launch_environment
from hybrid3d.cli import bench, certify, doctor, evaluate, export, plan, replay, report, serve, train
from hybrid3d.cli.signals import Stopped, flush_standard_streams, open_standard_streams, raised_signals
from hybrid3d.cli.terminal import DONE, FAILED, MISTAKE, print_message
from hybrid3d.errors import UserMistake, escape_control_characters, set_stream_errors

__all__ = ["DONE", "FAILED", "MISTAKE", "main"]

COMMANDS = (train, evaluate, export, plan, bench, doctor, certify, report, replay, serve)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code. Each command imports torch and the engines only when it needs them."""
    open_standard_streams()
    set_stream_errors()
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        with nullcontext() if _is_rank() else raised_signals():  # of a rank, its launcher says it
            return _run(arguments)
    except Stopped as stopped:
        print_message(str(stopped))
        return FAILED
    except BrokenPipeError:  # nobody reads what is printed
        return FAILED
    finally:
        flush_standard_streams()


def _is_rank() -> bool:
    try:
        return launch_environment.under_launcher()
    except UserMistake:  # `_run` says it
        return True


def _run(arguments: list[str]) -> int:
    options = _parse(arguments)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a recipe's paths are local, so nothing must be downloaded
    try:
        launch_environment.validate()
    except UserMistake as error:  # other ranks are unknown too, so each rank prints its own error
        print_message(str(error))
        return MISTAKE
    if launch_environment.under_launcher():
        try:
            launch_environment.master_address()
        except UserMistake as error:  # rank 0 cannot be reached, so each node prints the error
            if launch_environment.local_rank() == 0:
                print_message(str(error))
            return MISTAKE
    try:
        return int(options.run(options, arguments))
    except UserMistake as error:
        if launch_environment.under_launcher() and launch_environment.rank() > 0:
            from hybrid3d.launch import rendezvous

            if rendezvous.report(str(error)):  # rank 0 prints it once
                return MISTAKE
        print_message(str(error))
        return MISTAKE


class _Parser(argparse.ArgumentParser):
    """Escapes control characters in argparse's messages, which contain the arguments literally."""

    def error(self, message: str) -> NoReturn:
        super().error(escape_control_characters(message))


def _parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the arguments, allowing settings after options, which argparse alone does not."""
    parser = _parser()
    passed_on: Sequence[str] = ()
    if arguments[:1] == ["serve"] and "--" in arguments:
        end = arguments.index("--")
        arguments, passed_on = arguments[:end], arguments[end + 1 :]
    options, others = parser.parse_known_args(arguments)
    if passed_on:
        options.passed_on = passed_on
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
    for command in COMMANDS:
        command.add_parser(commands)
    return parser
