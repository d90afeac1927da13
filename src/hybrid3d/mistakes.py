"""What a user can get wrong: the command line prints such an error as one message and exits with 2."""

from __future__ import annotations


class UserMistake(ValueError):
    """Base class of errors that the user can mend. The message says what was found, what is expected, and the fix."""
