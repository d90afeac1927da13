"""Reads text, JSON and YAML files that a user wrote: regular files only, with bounds on bytes, depth and nodes.

Whatever such a file contains, reading it ends soon, with plain Python values or with an `UnreadableFile`. Uses only the
standard library and PyYAML.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

import yaml

from hybrid3d.errors import UserMistake

MAX_TEXT_BYTES = 256 * 1024  # 100 times the longest recipe here; PyYAML takes about 4 seconds for as much
MAX_JSON_BYTES = 64 * 2**20
MAX_DEPTH = 32
MAX_NODES = 50_000  # of a YAML text; the content of an alias is counted each time it is used
MAX_SCALAR = 400  # characters of a YAML number or date; longer ones take too long to convert or print

_KINDS = {
    stat.S_ISDIR: "a directory",
    stat.S_ISFIFO: "a named pipe (FIFO)",
    stat.S_ISSOCK: "a socket",
    stat.S_ISCHR: "a device",
    stat.S_ISBLK: "a device",
}
_SCHEME = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*:/+")
_CONVERSION_ERRORS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


class UnreadableFile(UserMistake):
    """A file that the user gave cannot be read; `why` says what is wrong, without the path."""

    def __init__(self, path: str, why: str) -> None:
        self.path, self.why = path, why
        super().__init__(path, why)  # both, so that the error can be pickled

    def __str__(self) -> str:
        return f"{self.path} {self.why}"


def read_text_file(path: str | Path, what: str = "a text file", limit: int = MAX_TEXT_BYTES) -> str:
    """Return the text of a regular file in UTF-8. A FIFO or a device is refused without opening it, which could block.

    Messages say what the file should be. `limit` is its maximum size in bytes.

    Raises:
        UnreadableFile: it is missing, no regular file, too large, or not UTF-8.
    """
    data = read_bytes(path, what, limit)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UnreadableFile(str(path), f"is not {what}: {error}") from error


def read_bytes(path: str | Path, what: str, limit: int) -> bytes:
    """Return the bytes of a regular file. Arguments and errors are those of `read_text_file`."""
    try:
        _check_regular(path, os.stat(path).st_mode)
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            opened = os.fstat(file.fileno())
            _check_regular(path, opened.st_mode)  # it may have been replaced since the first check
            data = file.read(limit + 1)
    except UnreadableFile:
        raise
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    if len(data) > limit:
        size = max(opened.st_size, len(data))
        raise UnreadableFile(str(path), f"is too large for {what}: {size:,} bytes, at most {limit:,}")
    return data


def check_regular_file(path: str | Path) -> None:
    """Check that a path is a regular file on this machine, without opening it.

    Raises:
        UnreadableFile: it is missing, a folder, a FIFO, a device, or an address (nothing is fetched).
    """
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        scheme = _SCHEME.match(str(path))
        address = scheme and f"is an address ({scheme[0]}...): copy it to a local file, nothing is fetched"
        raise UnreadableFile(str(path), address or "no such file") from None
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    _check_regular(path, mode)


def read_json_file(path: str | Path, what: str = "JSON") -> Any:
    """Return the value in a JSON file; messages say what it should be.

    Raises:
        UnreadableFile: it cannot be read, is not JSON (with the line), or is refused by `parse_json`.
    """
    text = read_text_file(path, what, MAX_JSON_BYTES)
    try:
        return parse_json(text)
    except ValueError as error:
        raise UnreadableFile(str(path), f"is not {what}: {error}") from error


def parse_json(text: str) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: not JSON, a duplicate key in an object, deeper than `MAX_DEPTH`, a number too long to convert, or a
            string with half of a surrogate pair.
    """
    too_deep = f"nested more than {MAX_DEPTH} levels deep"
    try:
        value = json.loads(text, object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError(too_deep) from None
    level, depth = [value], 0
    while level:  # iterates over levels, because recursion could overflow
        depth += 1
        if depth > MAX_DEPTH + 1:
            raise ValueError(too_deep)
        for node in level:
            if isinstance(node, str):
                _check_characters(node)
        inner = (node.values() if isinstance(node, dict) else node for node in level if isinstance(node, dict | list))
        level = [child for children in inner for child in children]
    return value


def parse_yaml(text: str) -> Any:
    """Return the value of a YAML text, in plain types only, whatever its tags.

    Raises:
        ValueError: not YAML, or beyond the bounds above; with the line and column where known.
    """
    if len(text) > MAX_TEXT_BYTES:
        raise ValueError(f"{len(text):,} characters, at most {MAX_TEXT_BYTES:,}")
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ValueError(f"not valid YAML: {where}{error.problem}") from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        character = f"U+{ord(error.character):04X}" if isinstance(error.character, str) else f"U+{error.character:04X}"
        raise ValueError(f"not valid YAML: line {line}: the character {character} is not allowed") from error
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"not valid YAML: {' '.join(str(error).split())}") from error


class _Loader(yaml.SafeLoader):
    """A loader of plain YAML that refuses duplicate keys, of which PyYAML silently keeps the last.

    The bounds are checked while nodes are composed, before any value is constructed.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = self._nodes = 0
        self._sizes: dict[int, int] = {}  # nodes by `id` of a composed node, which its parent keeps alive

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event, before = self.peek_event(), self._nodes  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent):
            node = super().compose_node(parent, index)
            if id(node) not in self._sizes:  # the node of its anchor contains it, and is still being composed
                _refuse(f"the alias *{event.anchor} refers to a value that contains it", event.start_mark)
            self._nodes += self._sizes[id(node)]
        else:
            self._nodes += 1
            self._depth += 1
            if self._depth > MAX_DEPTH:
                _refuse(f"nested more than {MAX_DEPTH} levels deep", event.start_mark)
            node = super().compose_node(parent, index)
            self._depth -= 1
            self._sizes[id(node)] = self._nodes - before
        if self._nodes > MAX_NODES:
            _refuse(f"more than {MAX_NODES:,} values, those of aliases counted each time", event.start_mark)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        tag = node.tag.rpartition(":")[2]
        if isinstance(node, yaml.ScalarNode):
            if tag != "str" and len(node.value) > MAX_SCALAR:
                _refuse(f"a value of {len(node.value):,} characters that is no string", node.start_mark)
            try:
                _check_characters(node.value)
            except ValueError as error:
                _refuse(str(error), node.start_mark)
        try:
            return super().construct_object(node, deep)
        except _CONVERSION_ERRORS as error:
            shown = f"{node.value!r} " if isinstance(node, yaml.ScalarNode) else ""
            why = f": {error}" if type(error) is ValueError else ""
            _refuse(f"{shown}cannot be read as {tag}{why}", node.start_mark)

    def construct_mapping(self, node: yaml.Node, deep: bool = False) -> dict[Any, Any]:
        if isinstance(node, yaml.MappingNode):
            seen: set[str] = set()
            for key, _ in node.value:
                name = str(key.value)
                if name in seen:
                    _refuse(f"{name!r} occurs twice", key.start_mark)
                seen.add(name)
        return super().construct_mapping(node, deep)  # type: ignore[arg-type]


def _refuse(problem: str, mark: Any) -> NoReturn:
    raise yaml.constructor.ConstructorError(problem=problem, problem_mark=mark)


def _check_characters(text: str) -> None:
    """Refuse characters that no file name and no UTF-8 text can contain. ValueError: there is one."""
    if "\0" in text:
        raise ValueError("a string holds a NUL character")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"a string holds half of a surrogate pair, U+{ord(text[error.start]):04X}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object with these keys and values. ValueError: a duplicate key."""
    result = dict(pairs)
    if len(result) < len(pairs):
        duplicate = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {duplicate!r} occurs twice in an object")
    for name in result:
        _check_characters(name)
    return result


def _unreadable(path: str | Path, error: OSError | ValueError) -> UnreadableFile:
    # ValueErrors are of a path with a NUL character, or with half of a surrogate pair
    why = error.strerror if isinstance(error, OSError) else error
    return UnreadableFile(str(path), f"cannot be read: {why}")


def _check_regular(path: str | Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = next((words for test, words in _KINDS.items() if test(mode)), "no regular file")
        raise UnreadableFile(str(path), f"cannot be read: it is {kind}, and a regular file is expected")
