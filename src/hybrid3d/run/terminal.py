"""Consoles that print text literally: without markup or emoji codes, and with control characters escaped.

What a console that is closed, or a full disk, does not take is lost: a run does not end for that.
"""

from __future__ import annotations

import os
import sys
from typing import Any, Literal

from rich.console import Console

from hybrid3d.errors import escape_control_characters


class _PlainConsole(Console):
    def _write_buffer(self) -> None:
        try:
            super()._write_buffer()
        except OSError:
            self.quiet = True
        except ValueError:
            if not self.file.closed:
                raise
            self.quiet = True

    def on_broken_pipe(self) -> None:  # rich's exits
        self.quiet = True

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(
            *(escape_control_characters(each) if isinstance(each, str) else each for each in objects), **options
        )


def plain_console(**options: Any) -> Console:
    """Return a `rich` console with these options that prints text literally."""
    return _PlainConsole(**options, emoji=False, markup=False, highlight=False)


def print_error(console: Console, message: str, style: str = "red") -> None:
    """Print a message about a failure, without wrapping its lines."""
    console.print(message, style=style, highlight=False, markup=False, soft_wrap=True)


def duplicate_console(descriptor: Literal[1, 2]) -> Console:
    """Return a console on what stdout (1) or stderr (2) is now. It replaces characters that it cannot show."""
    encoding = (sys.stdout if descriptor == 1 else sys.stderr).encoding
    return plain_console(file=os.fdopen(os.dup(descriptor), "w", encoding=encoding, errors="replace"))
