"""Files that a user wrote: whatever they hold, reading them ends soon, with plain values or with one message."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import re
import socket
import time
from pathlib import Path

import pytest

from hybrid3d.config import RecipeError, load_recipe
from hybrid3d.storage.user_files import (
    MAX_DEPTH,
    MAX_TEXT_BYTES,
    UnreadableFile,
    parse_json,
    parse_yaml,
    read_json_file,
    read_text_file,
)

LETTERS = "abcdefghijk"
BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in itertools.pairwise(LETTERS)
)
MERGE_BOMB = "a: &a {x: 1}\n" + "".join(
    f"{new}: &{new} {{<<: [{', '.join([f'*{old}'] * 9)}]}}\n" for old, new in itertools.pairwise(LETTERS)
)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: &a [*a, *a]", "line 1, column 8: the alias *a refers to a value that contains it"),
        ("a: &a {<<: *a}", "line 1, column 12: the alias *a refers to a value that contains it"),
        (BOMB, "line 5, column 28: more than 50,000 values, those of aliases counted each time"),
        (MERGE_BOMB, "line 6, column 17: more than 50,000 values, those of aliases counted each time"),
        ("[" * 100_000, f"line 1, column 33: nested more than {MAX_DEPTH} levels deep"),
        ("{a: " * 5_000, f"line 1, column 126: nested more than {MAX_DEPTH} levels deep"),
        ("- " * 50_000, f"line 1, column 65: nested more than {MAX_DEPTH} levels deep"),
        ("a: !!bool abc", "line 1, column 4: 'abc' cannot be read as bool"),
        ('a: !!int ""', "line 1, column 4: '' cannot be read as int"),
        ("a: !!float x", "line 1, column 4: 'x' cannot be read as float: could not convert string to float: 'x'"),
        ("a: !!timestamp x", "line 1, column 4: 'x' cannot be read as timestamp"),
        ("a: !!map [1]", "line 1, column 4: expected a mapping node, but found sequence"),
        ("a: !!set [1]", "line 1, column 4: expected a mapping node, but found sequence"),
        ("a: !!str {b: 1}", "line 1, column 4: expected a scalar node, but found mapping"),
        ("a: 0x" + "f" * 5_000, "line 1, column 4: a value of 5,002 characters that is no string"),
        ("a: " + "9" * 5_000, "line 1, column 4: a value of 5,000 characters that is no string"),
        ('a: "\\ud800"', "line 1, column 4: a string holds half of a surrogate pair, U+D800"),
        ('a:\n  "b\\0": 1', "line 2, column 3: a string holds a NUL character"),
        ("a: 1\nb: \0", "line 2: the character U+0000 is not allowed"),
        ("a: 1\nb: \x1b[31m", "line 2: the character U+001B is not allowed"),
        ("a: \udcff", "line 1: the character U+DCFF is not allowed"),
        ("a: 1\n---\nb: 2", "line 2, column 1: but found another document"),
        ("? [a]\n: 1", "line 1, column 3: found unhashable key"),
    ],
)
def test_yaml_that_is_refused(text: str, problem: str) -> None:
    begun = time.process_time()
    with pytest.raises(ValueError, match="not valid YAML") as caught:
        parse_yaml(text)
    assert str(caught.value) == f"not valid YAML: {problem}"
    assert time.process_time() - begun < 2


@pytest.mark.parametrize("tag", ["object/apply:os.system [ls]", "name:os.system x", "module:os x", "tuple [1]"])
def test_tags_of_python_are_refused(tag: str) -> None:
    with pytest.raises(ValueError, match=r"line 1, column 4: could not determine a constructor for the tag '.*python/"):
        parse_yaml(f"a: !!python/{tag}")


def test_yaml_that_is_read() -> None:
    assert parse_yaml("a: &x {b: 1}\nc: *x\nd: {<<: *x, e: 2}") == {"a": {"b": 1}, "c": {"b": 1}, "d": {"b": 1, "e": 2}}
    assert parse_yaml("[" * MAX_DEPTH + "]" * MAX_DEPTH) is not None
    assert parse_yaml('"日本 \\t 🚀"') == "日本 \t 🚀"


def test_slowest_text_of_the_allowed_size_takes_seconds() -> None:
    text = "".join(f"k{number}: b\n" for number in range(24_000))
    begun = time.process_time()
    assert len(parse_yaml(text)) == 24_000
    assert time.process_time() - begun < 15
    with pytest.raises(ValueError, match=r"262,145 characters, at most 262,144"):
        parse_yaml(" " * (MAX_TEXT_BYTES + 1))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[" * 100_000, f"nested more than {MAX_DEPTH} levels deep"),
        ('{"a":' * 40 + "1" + "}" * 40, f"nested more than {MAX_DEPTH} levels deep"),
        ('{"a": ["\\ud800"]}', "a string holds half of a surrogate pair, U+D800"),
        ('{"\\udc00": 1}', "a string holds half of a surrogate pair, U+DC00"),
        ('{"a": {"b": 1, "b": 2}}', "the key 'b' occurs twice in an object"),
        ("1" * 5_000, "Exceeds the limit"),
        ("[1,]", "line 1"),
    ],
)
def test_json_that_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)):
        parse_json(text)
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(UnreadableFile, match=rf"{path} is not JSON: .*{re.escape(problem)}"):
        read_json_file(path)


def test_json_that_is_read(tmp_path: Path) -> None:
    value = {"a": [1, 2.5, None, True, {"b": "日本 🚀"}]}
    path = tmp_path / "a.json"
    path.write_text(json.dumps(value))
    assert read_json_file(path) == value
    assert parse_json("[" * MAX_DEPTH + "]" * MAX_DEPTH) is not None


def test_read_text_file_opens_only_regular_files(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        kinds = {
            fifo: "a named pipe (FIFO)",
            tmp_path / "socket": "a socket",
            tmp_path: "a directory",
            Path("/dev/zero"): "a device",
        }
        for path, kind in kinds.items():
            with pytest.raises(UnreadableFile) as caught:
                read_text_file(path)
            assert str(caught.value) == f"{path} cannot be read: it is {kind}, and a regular file is expected"
            with pytest.raises(RecipeError, match=f"cannot be read: it is {kind[:8]}"):
                load_recipe(path)


def test_paths_that_no_file_has(tmp_path: Path) -> None:
    for path, why in {
        "a\0b": "embedded null",  # and more, by Python's version
        "a" * 300: "File name too long",
        "b/" * 5_000: "File name too long",
        str(tmp_path / "none"): "No such file or directory",
        "\udcff\ud800": "surrogates not allowed",
    }.items():
        with pytest.raises(UnreadableFile, match=why):
            read_text_file(path)
        with pytest.raises(RecipeError, match=why):
            load_recipe(path)


def test_file_is_bounded_in_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes(b"#" * (MAX_TEXT_BYTES + 1))
    with pytest.raises(UnreadableFile) as caught:
        read_text_file(path, "a recipe")
    assert str(caught.value) == f"{path} is too large for a recipe: 262,145 bytes, at most 262,144"
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    os.truncate(path, MAX_TEXT_BYTES)
    assert len(read_text_file(path)) == MAX_TEXT_BYTES
    with open(path, "wb") as file:
        file.truncate(2**40)  # a sparse file of 1 TiB
    with pytest.raises(UnreadableFile, match="1,099,511,627,776 bytes"):
        read_text_file(path)
