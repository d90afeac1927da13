"""Exit codes, messages and arguments that all commands share."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from hybrid3d.config import RecipeError
from hybrid3d.config.schema import FilePath, read_value

if TYPE_CHECKING:
    from rich.console import Console

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

DONE, FAILED, MISTAKE = 0, 1, 2


def print_message(message: str) -> None:
    """Print why a command ends to stderr."""
    make_console(stderr=True).print(message, style="red", soft_wrap=True)


def make_console(stderr: bool = False) -> Console:
    """Return a console for messages without decoration."""
    from hybrid3d.run import terminal

    return terminal.plain_console(stderr=stderr)


def path_argument(text: str, option: str) -> Path:
    """Return a path from the command line; raise RecipeError if it is not a valid one."""
    try:
        return Path(read_value(FilePath, text))
    except ValueError as error:
        raise RecipeError(option, [str(error)]) from None


def why_unwritable(path: Path) -> str:
    """Return why a file cannot be written there, for a check before work that takes time; empty if it can."""
    if path.is_dir():
        return "it is a folder"
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}"
    return "" if os.access(path if path.exists() else path.parent, os.W_OK) else "no permission"


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a command that takes a recipe and settings that override it."""
    parser.add_argument("recipe", help="a recipe's YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that override the recipe's")
