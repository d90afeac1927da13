"""The walks of `docs/design.md` name files and functions that the code has. Nothing of it is imported."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "hybrid3d"
PAGE = (ROOT / "docs/design.md").read_text(encoding="utf-8")
CALL = re.compile(r"`([\w/]+\.py): ([\w.]+)`")
WALKS = {"A weight": 25, "A sample": 25, "A reward": 6, "A version": 25}  # and the most stops that each may have


def walk(title: str) -> list[str]:
    """The steps of a walk: the items of the numbered list below its heading."""
    section = re.split(r"^#+ ", PAGE.split(f"\n### {title}\n")[1], maxsplit=1, flags=re.MULTILINE)[0]
    return re.findall(r"^\d+\. (.*(?:\n {3}.*)*)", section, re.MULTILINE)


@cache
def names(file: str) -> set[str]:
    """The functions and classes of a file, and the methods of its classes as Class.method."""
    found: set[str] = set()
    for node in ast.parse((PACKAGE / file).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
    return found


@pytest.mark.parametrize("title", WALKS)
def test_walk_steps_begin_with_a_call(title: str) -> None:
    steps = walk(title)
    assert 6 <= len(steps) <= WALKS[title]
    assert [step for step in steps if not CALL.match(step)] == []


@pytest.mark.parametrize(("file", "name"), sorted(set(CALL.findall(PAGE))))
def test_walk_calls_are_in_their_files(file: str, name: str) -> None:
    assert (PACKAGE / file).is_file()
    assert name in names(file)


def test_call_that_is_not_there_would_be_found() -> None:
    assert {"train_rl"} <= names("trainer/rl.py")
    assert {"WeightSync", "WeightSync.finish"} <= names("sync/session.py")
    assert "WeightSync.no_such_method" not in names("sync/session.py")
    assert "finish" not in names("sync/session.py")


def test_page_begins_with_the_sync() -> None:
    first, *others = re.findall(r"^## (.*)$", PAGE, re.MULTILINE)
    assert first == "The sync"
    assert others[0] == "Four walks"


def test_glossary_is_short() -> None:
    glossary = PAGE.split("\n## Glossary\n")[1]
    assert 8 <= len(re.findall(r"^\| ", glossary, re.MULTILINE)) - 1 <= 14
