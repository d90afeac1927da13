"""Every setting of a recipe, of what `src/hybrid3d/sections/` says of it: `python docs/recipe.py` writes the page."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

import yaml

from hybrid3d.config import Recipe
from hybrid3d.config.schema import expected, section_of
from hybrid3d.run.live_settings import MUTABLE_SETTINGS

PAGE = Path(__file__).with_suffix(".md")
HEAD = f"""\
<!-- Made by `python docs/{PAGE.stem}.py`: edit the docstrings in `src/hybrid3d/sections/` instead. -->
# Every setting of a recipe

A recipe is YAML: `name`, and the sections below. Any setting can also follow a command, as
`hybrid3d train recipes/demo-cpu.yaml train.tp=1 name=demo-tp1`. A setting without a default must be said. Those with a
star may change while a run goes on: by the section `schedule`, or by a file in the run's folder
(`docs/run-folder.md`).
"""


def page() -> str:
    """The page's text."""
    return "\n".join([HEAD, *(line for name, kind in sections(Recipe, "") for line in section(name, kind))])


def sections(kind: type[Any], path: str) -> Iterator[tuple[str, type[Any]]]:
    """Each section with its dotted name, those within it after it."""
    for name, hint in get_type_hints(kind, include_extras=True).items():
        inner = section_of(hint)
        if inner is not None and not (path and is_row(hint)):
            yield f"{path}{name}", inner
            yield from sections(inner, f"{path}{name}.")


def section(name: str, kind: type[Any]) -> Iterator[str]:
    """Its lines: what it is about, and a row for each setting."""
    about, meanings = read_docstring(kind)
    yield from (f"## {name}", "", about, "", "| setting | value | default | meaning |", "|---|---|---|---|")
    hints = get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        if not is_row(hints[field.name]):
            continue
        star = r"\*" if any(fnmatchcase(f"{name}.{field.name}", pattern) for pattern in MUTABLE_SETTINGS) else ""
        words = f"`{field.name}`{star}", values(hints[field.name]), default(field), meanings[field.name]
        yield f"| {' | '.join(words)} |"
    yield ""


def is_row(hint: Any) -> bool:
    """Whether a field of a section is one of its rows: a setting, or a section like another, which may be left out."""
    return section_of(hint) is None or NoneType in get_args(hint)


def read_docstring(kind: type[Any]) -> tuple[str, dict[str, str]]:
    """What stands before its attributes, and the meaning of each."""
    about, _, attributes = (inspect.getdoc(kind) or "").partition("\n\nAttributes:\n")
    found = {}
    for names, meaning in re.findall(r"^    (\w[\w, ]*): (.*(?:\n {8}.*)*)", attributes, re.MULTILINE):
        found |= dict.fromkeys(names.split(", "), " ".join(meaning.split()).removesuffix("."))
    return " ".join(about.split()), found


def values(hint: Any) -> str:
    """What a setting accepts."""
    if section_of(hint) is not None:
        return "a section, `null`"
    kinds = [kind for kind in get_args(hint) if kind is not NoneType] if NoneType in get_args(hint) else [hint]
    words = re.sub(", not empty|, of at most .* printable characters|, of printable .*", "", expected(kinds[0]))
    said = f"`{words.removeprefix('one of ').replace(', ', '`, `')}`" if words.startswith("one of ") else words
    return said if kinds[0] is hint else f"{said}, `null`"


def default(field: dataclasses.Field[Any]) -> str:
    """As YAML has it; nothing where a recipe must say."""
    if field.default is dataclasses.MISSING:
        return ""
    return f"`{yaml.safe_dump(field.default).splitlines()[0]}`"


if __name__ == "__main__":
    PAGE.write_text(page())
