"""What `docs/api.md` promises to scripts: the names and their parameters, as `tests/api.txt` lists them.

A line that is gone or differs breaks somebody's script: say so in CHANGELOG.md, and write the list anew with

    PYTHONPATH=src python tests/house/test_api_page.py
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGE, PROMISED = ROOT / "docs/api.md", ROOT / "tests/api.txt"
DIRECTIVE = re.compile(r"^\.\. (currentmodule|automodule|autofunction|autoclass|autoexception):: (\S+)$", re.MULTILINE)


def promised(page: str) -> Iterator[str]:
    """Yield each name that the page documents, with the parameters that it takes."""
    module = ""
    for kind, name in DIRECTIVE.findall(page):
        if kind == "currentmodule":
            module = name
        elif kind == "automodule":
            of = importlib.import_module(name)
            names = (key for key, value in vars(of).items() if getattr(value, "__module__", "") == name)
            yield from (said(f"{name}.{key}") for key in sorted(names) if key[0] != "_" and callable(vars(of)[key]))
        else:
            yield said(name if "." in name else f"{module}.{name}")


def said(path: str) -> str:
    module, _, name = path.rpartition(".")
    value: Any = getattr(importlib.import_module(module), name)
    if isinstance(value, type) and issubclass(value, Exception):
        return f"{path}: {', '.join(base.__name__ for base in value.__mro__[1:-3])}"
    parameters = [
        f"{'*' if each.kind is each.KEYWORD_ONLY else ''}{each.name}{'' if each.default is each.empty else '='}"
        for each in inspect.signature(value).parameters.values()
    ]
    return f"{path}({', '.join(parameters)})"


def test_api_page_keeps_what_it_promises() -> None:
    assert list(promised(PAGE.read_text())) == PROMISED.read_text().splitlines()


def test_change_would_be_found() -> None:
    lines = list(promised(PAGE.read_text()))
    assert "hybrid3d.config.load_recipe(path, overrides=)" in lines
    assert len(lines) > 20


if __name__ == "__main__":
    PROMISED.write_text("".join(f"{line}\n" for line in promised(PAGE.read_text())))
