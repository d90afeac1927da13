"""What a user can get wrong: the command line prints such an error as one message and exits with 2."""

from __future__ import annotations

import unicodedata


class UserMistake(ValueError):
    """Base class of errors that the user can mend. The message says what was found, what is expected, and the fix."""


# Control characters (escape sequences of a terminal), invisible ones, halves of surrogate pairs, and line separators
_HIDDEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}


def escape_control_characters(text: str) -> str:
    """A text in which every character that a terminal would act upon or not show is escaped, but for line breaks."""
    return "".join(
        char if char in "\n\t" or unicodedata.category(char) not in _HIDDEN else ascii(char)[1:-1] for char in text
    )
