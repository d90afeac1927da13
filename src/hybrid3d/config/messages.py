"""The words of messages about settings: values, keys, and what may have been meant."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Sequence
from types import NoneType

TYPE_NAMES: dict[type, str] = {
    int: "an integer",
    float: "a number",
    str: "a string",
    bool: "a boolean",
    list: "a list",
    dict: "a section",
    NoneType: "nothing",
}


def format_value(value: object) -> str:
    """Return a value for a message, with the name of its type."""
    name = TYPE_NAMES.get(type(value), type(value).__name__)
    return name if value is None or isinstance(value, dict) else f"{reprlib.repr(value)} ({name})"


def format_key(key: object) -> str:
    """Return a key for a message: verbatim if it is short and printable, otherwise its repr."""
    text = str(key) if not isinstance(key, float | int) else repr(key)
    return text if len(text) <= 100 and text.isprintable() else reprlib.repr(text)


def one_line(text: str) -> str:
    """Return a text for a message, as its repr if it has characters that are not printable."""
    return text if text.isprintable() else repr(text)


def unknown_key_problem(key: object, known: Sequence[str], path: str) -> str:
    """Return the message that a section has no such key."""
    where = f"keys of {path}" if path else "sections"
    suggestion = did_you_mean(key, known)
    return f"{join_keys(path, format_key(key))}: unknown key{suggestion}; known {where}: {', '.join(known)}"


def did_you_mean(word: object, known: Sequence[str]) -> str:
    """Return a suggestion of the known word that is most like this one; empty if none is."""
    close = difflib.get_close_matches(str(word), known, n=1)
    return f", did you mean {close[0]}?" if close else ""


def join_keys(path: str, key: str) -> str:
    """Return the dotted name of a key in the section `path`."""
    return f"{path}.{key}" if path else key
