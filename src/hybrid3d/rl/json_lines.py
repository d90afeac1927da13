"""Reads columns of a file of JSON Lines: of each line the values that are asked for, whatever else is in it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hybrid3d.errors import UserMistake

NOT_JSON = "not a readable file of JSON Lines"
NAMED_LINES = 100  # whose keys a message lists
_KINDS = {bool: "true or false", int: "a number", float: "a number", dict: "an object", list: "a list"}
_KINDS[type(None)] = "null"


class InvalidLine(UserMistake):
    """A line that cannot be used; the message says which and why, without the file."""


def read_json_columns(
    path: str | Path, columns: Sequence[str], chats: Sequence[str], first: int | None = None
) -> list[list[Any]]:
    """Return the strings or chat turns of each column, None where a value is null or absent. Blank lines are no rows.

    A dotted column may lie within objects; those in `chats` may hold chat turns. Only the `first` rows are
    read, if it is given.

    Raises:
        InvalidLine: a line is no object or too deep, a value is no text, or no line has a column.
        OSError: the file cannot be read.
    """
    found: list[list[Any]] = [[] for _ in columns]
    names, present = dict[str, None](), set[str]()
    for number, row in _rows(path):
        if number <= NAMED_LINES:
            names |= dict.fromkeys(_names_in(row))
        for values, column in zip(found, columns, strict=True):
            is_there, value = _value(row, column)
            if is_there:
                present.add(column)
                _check(value, column, column in chats, number)
            values.append(value)
        if first is not None and len(found[0]) >= first:
            break
    is_whole = first is None or len(found[0]) < first
    for column in columns:
        if found[0] and is_whole and column not in present:
            raise InvalidLine(f"no column {column!r}; the columns there: {', '.join(names)}")
    return found


def _rows(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the objects of a file with the numbers of their lines, from 1."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if not line.strip():
                continue
            try:
                row = _parse(line.decode("utf-8"))
            except RecursionError:
                raise InvalidLine(f"{NOT_JSON}: line {number} is nested too deep") from None
            except json.JSONDecodeError as error:
                raise InvalidLine(f"{NOT_JSON}: line {number}, column {error.colno}: {error.msg}") from None
            except UnicodeDecodeError as error:
                raise InvalidLine(f"{NOT_JSON}: line {number} is not UTF-8: {error.reason}") from None
            if not isinstance(row, dict):
                raise InvalidLine(f"{NOT_JSON}: line {number} holds {_kind(row)}, expected an object")
            yield number, row


def _parse(line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        raise
    except ValueError:  # a number of more digits than Python converts, in a column that nobody may use
        return json.loads(line, parse_int=float)


def _value(row: Mapping[str, Any], column: str) -> tuple[bool, Any]:
    """Return whether a row has a column, and its value; what is null may have had it."""
    if column in row:
        return True, row[column]
    value: Any = row
    for name in column.split("."):
        if not isinstance(value, dict):
            return value is None, None
        if name not in value:
            return False, None
        value = value[name]
    return True, value


def _check(value: Any, column: str, may_be_chat: bool, line: int) -> None:
    """Check that a value is a text or null, or chat turns. InvalidLine: it is not."""
    texts = [value]
    if isinstance(value, list) and all(turn is None or isinstance(turn, dict) for turn in value):
        if not may_be_chat:
            raise InvalidLine(
                f"line {line}: column {column!r} holds chat turns: only prompts and pairs may, "
                "with data.chat_template: true"
            )
        texts = [turn.get(key) for turn in value if turn is not None for key in ("role", "content")]
    for text in texts:
        if text is not None and not isinstance(text, str):
            raise InvalidLine(f"line {line}: column {column!r} holds {_kind(text)}, expected strings")
        try:
            (text or "").encode()
        except UnicodeEncodeError:
            problem = f"line {line}: column {column!r} holds half of a surrogate pair, which is no text"
            raise InvalidLine(problem) from None


def _names_in(row: Mapping[str, Any], within: str = "") -> Iterator[str]:
    for name, value in row.items():
        if within and "." in name:
            continue
        if isinstance(value, dict) and value and within.count(".") < 8:
            yield from _names_in(value, f"{within}{name}.")
        else:
            yield within + name


def _kind(value: Any) -> str:
    return _KINDS.get(type(value), "a string")
