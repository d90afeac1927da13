"""Writes `docs/recipe.md`, the table of all recipe settings, from the docstrings in `src/hybrid3d/config/sections/`.

Run `python docs/recipe.py` after changing a setting or its docstring.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

import yaml

from hybrid3d.config import Recipe
from hybrid3d.config.schema import describe_type, key_of, section_type
from hybrid3d.run.live_settings import MUTABLE_SETTINGS

PAGE = Path(__file__).with_suffix(".md")
MARK = "†"
# By section, the settings that a first run needs: those without a default, and what most recipes set
FIRST_RUN: Mapping[str, Sequence[str]] = {
    "model": ("path", "dtype"),
    "train": ("tp", "pp", "ep", "dp", "micro_batch_size", "recompute"),
    "rollout": ("tp", "dp", "expert_parallel", "max_model_len", "max_new_tokens", "gpu_memory_utilization"),
    "data": ("train", "eval", "prompt", "answer", "chat_template"),
    "reward": ("name",),
    "algorithm": ("name", "prompts_per_step", "samples_per_prompt"),
    "algorithm.kl": ("where", "coef"),
    "optimizer": ("lr",),
    "run": ("steps", "eval_every", "checkpoint_every"),
    "machine": ("gpus_per_node", "kind"),
}
HEADER = f"""\
<!-- Made by `python docs/{PAGE.stem}.py`: edit the docstrings in `src/hybrid3d/config/sections/` instead. -->
# Every setting of a recipe

A recipe is a YAML file with a `name` and the sections below. Settings can also be given on the command line, as in
`hybrid3d train recipes/demo-cpu.yaml train.tp=1 name=demo-tp1`. A setting without a default is required. Settings with
a star can change during a run: by the section `schedule`, or by a file in the run's folder (`docs/run-folder.md`).

**A first run** needs the settings with {MARK}: a model, data, both layouts, lengths, batch sizes, a learning rate and a
number of steps. The recipes in `recipes/` set them for models of 7B to 1T. All others can stay as they are.

`tracking: [tensorboard, wandb, mlflow, prometheus]`, or some of these, sends the metrics there (`docs/tracking.md`).
"""


def page() -> str:
    """Return the text of the page."""
    lines = (line for name, kind in iter_sections(Recipe, "") for line in section_lines(name, kind))
    return "\n".join([HEADER, *lines])


def iter_sections(kind: type[Any], path: str) -> Iterator[tuple[str, type[Any]]]:
    """Yield the dotted name and the dataclass of each section, followed by its subsections.

    An optional subsection with the keys of a section of the recipe is not yielded again.
    """
    sections = {section_type(hint) for hint in get_type_hints(Recipe, include_extras=True).values()}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        subsection = section_type(hint)
        if subsection is not None and not (path and subsection in sections):
            yield f"{path}{key_of(name)}", subsection
            yield from iter_sections(subsection, f"{path}{key_of(name)}.")


def section_lines(name: str, kind: type[Any]) -> Iterator[str]:
    """Yield the lines of a section: its heading, its summary, and a table with a row per setting."""
    summary, meanings = read_docstring(kind)
    yield from (f"## {name}", "", summary, "", "| setting | value | default | meaning |", "|---|---|---|---|")
    hints = get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        if not is_row(hints[field.name]):
            continue
        star = r"\*" if any(fnmatchcase(f"{name}.{field.name}", pattern) for pattern in MUTABLE_SETTINGS) else ""
        mark = f" {MARK}" if field.name in FIRST_RUN.get(name, ()) else ""
        cells = (
            f"`{field.name}`{star}{mark}",
            format_values(hints[field.name]),
            format_default(field),
            meanings[field.name],
        )
        yield f"| {' | '.join(cells)} |"
    yield ""


def is_row(hint: Any) -> bool:
    """Return whether a field is a row of its section's table: a setting, or an optional section."""
    return section_type(hint) is None or NoneType in get_args(hint)


def read_docstring(kind: type[Any]) -> tuple[str, dict[str, str]]:
    """Return the summary of a section's docstring, and the meaning of each setting."""
    summary, _, attributes = (inspect.getdoc(kind) or "").partition("\n\nAttributes:\n")
    meanings = {}
    for names, meaning in re.findall(r"^    (\w[\w, ]*): (.*(?:\n {8}.*)*)", attributes, re.MULTILINE):
        meanings |= dict.fromkeys(names.split(", "), " ".join(meaning.split()).removesuffix("."))
    return " ".join(summary.split()), meanings


def format_values(hint: Any) -> str:
    """Describe the values that a setting accepts."""
    if section_type(hint) is not None:
        return "a section, `null`"
    kinds = [kind for kind in get_args(hint) if kind is not NoneType] if NoneType in get_args(hint) else [hint]
    text = re.sub(", not empty|, of at most .* printable characters|, of printable .*", "", describe_type(kinds[0]))
    text = f"`{text.removeprefix('one of ').replace(', ', '`, `')}`" if text.startswith("one of ") else text
    return text if kinds[0] is hint else f"{text}, `null`"


def format_default(field: dataclasses.Field[Any]) -> str:
    """Return a setting's default as YAML, or an empty string if the setting is required."""
    if field.default_factory is not dataclasses.MISSING:
        return f"`{yaml.safe_dump(field.default_factory()).strip()}`"
    if field.default is dataclasses.MISSING:
        return ""
    return f"`{yaml.safe_dump(field.default).splitlines()[0]}`"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
