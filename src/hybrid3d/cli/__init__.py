"""The command line, a module for each command.

`hybrid3d train | eval | export | plan | bench | doctor | certify | report | replay | serve`.

Exit codes: 0 for success, 1 if the run failed, 2 for a mistake of the user, which is found before ranks start.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from types import FrameType
from typing import NoReturn

from hybrid3d import __version__, launch_environment
from hybrid3d.cli import bench, certify, checkpoint, doctor, plan, replay, report, serve, train
from hybrid3d.cli.terminal import DONE, FAILED, MISTAKE, print_message
from hybrid3d.errors import UserMistake, escape_control_characters, set_stream_errors

__all__ = ["DONE", "FAILED", "MISTAKE", "main"]

COMMANDS = (train, checkpoint, plan, bench, doctor, certify, report, replay, serve)
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


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
    parser = _Parser(prog="hybrid3d", description=__doc__.split("\n")[0])
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(commands)
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


class Stopped(BaseException):
    """Raised in the main thread by the first of these signals; not an `Exception`, as it is no failure to handle."""

    def __init__(self, number: int):
        super().__init__(f"stopped by {signal.Signals(number).name}")


@contextmanager
def raised_signals() -> Iterator[None]:
    """Let signals that end a process raise `Stopped` in this one, which then ends its children and reports it.

    A signal that this process was started to ignore, as by nohup, stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    process = os.getpid()
    before = {number: handler for number in SIGNALS if (handler := signal.getsignal(number)) != signal.SIG_IGN}

    def stop(number: int, frame: FrameType | None) -> None:
        if os.getpid() != process:  # a child that was forked, and has no other handler yet
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        for each in SIGNALS:
            signal.signal(each, signal.SIG_IGN)  # what ends now is not to be interrupted
        raise Stopped(number)

    for number in before:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def open_standard_streams() -> None:
    """Open standard streams that this process was started without: other files would get their descriptors."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest that is free
            assert opened == descriptor, "those below it are open"
            os.set_inheritable(descriptor, True)
            if descriptor:
                setattr(sys, name, os.fdopen(descriptor, "w", encoding="utf-8", closefd=False))


def flush_standard_streams() -> None:
    """Flush the standard streams, or give up what a closed or full one does not take, before Python ends with it."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            with suppress(OSError):
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, stream.fileno())
                os.close(null)
