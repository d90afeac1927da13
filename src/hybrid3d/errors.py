"""Errors that users can fix: the command line prints them as one message and exits with code 2."""

from __future__ import annotations

import io
import sys
import unicodedata


class UserMistake(ValueError):
    """Base class of errors that the user can fix. The message says what was found, what is expected, and the fix."""


# Unicode categories of control characters (terminal escapes), invisible characters, surrogates and line separators
_ESCAPED_CATEGORIES = {"Cc", "Cf", "Cs", "Zl", "Zp"}


def escape_control_characters(text: str) -> str:
    """Escape all characters that a terminal would interpret or not show, except line breaks and tabs."""
    return "".join(
        char if char in "\n\t" or unicodedata.category(char) not in _ESCAPED_CATEGORIES else ascii(char)[1:-1]
        for char in text
    )


def set_stream_errors(encoding: str | None = None) -> None:
    """Make stdout and stderr replace characters that their encoding lacks, which would raise otherwise.

    They get this encoding; None leaves that of the locale.
    """
    for stream, errors in ((sys.stdout, "replace"), (sys.stderr, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding=encoding, errors=errors)
