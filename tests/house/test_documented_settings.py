"""Every setting and every piece of a recipe in a document is one that a recipe may have, with such a value."""

from __future__ import annotations

import functools
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybrid3d.config import RecipeError, load_recipe
from hybrid3d.config.schema import flatten_settings, to_raw
from hybrid3d.run.identity import FREE
from hybrid3d.storage.user_files import parse_yaml

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "recipes/demo-cpu.yaml"
PAGES = [
    *(ROOT / "docs").glob("*.md"),
    *(ROOT / "benchmarks/results").glob("*.md"),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
]
SETTING = re.compile(r"(?<![\w./\-])((?:[a-z_0-9]+\.)+[a-z_0-9]+)=(\[[^\]`]*\]|\{[^}`]*\}|[^\s`|,;)]*)")
PLACEHOLDER = re.compile(r"|\.\.\.|.*\b[A-Z]+\b.*|value")  # of a value, as in run.record=every-N
# What says that a key or a value does not exist; other errors are about settings that do not go together
INVALID = re.compile(r"unknown|expected|not valid YAML")
REFUSED = re.compile(r"refuse|not supported|no longer|until now|cannot be set")
SECTIONS = set(parse_yaml(DEMO.read_text())) | {"lora", "roles", "async", "evaluation", "critic", "guard", "schedule"}
NAMES = "|".join(sorted(SECTIONS))


def settings() -> Iterator[tuple[str, str, str, str]]:
    for page in sorted(PAGES):
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
            for key, value in SETTING.findall(line):
                if not PLACEHOLDER.fullmatch(value):
                    yield f"{page.relative_to(ROOT)}:{number}", key, value.rstrip(".:"), line


def fragments() -> Iterator[tuple[str, str]]:
    """Yield the indented and fenced blocks that are pieces of a recipe."""
    for page in sorted(PAGES):
        text = page.read_text(encoding="utf-8")
        blocks = [found[0] for found in re.finditer(r"(?:^ {4}.*\n(?:^\s*\n(?= {4}))?)+", text, re.MULTILINE)]
        blocks += re.findall(r"```ya?ml\n(.*?)```", text, re.DOTALL)
        for block in blocks:
            dedented = textwrap.dedent(block)
            if re.match(rf"({NAMES}):(\s|$)", dedented):
                yield str(page.relative_to(ROOT)), dedented
        for inline in re.findall(rf"`((?:{NAMES}): \{{[^`]*\}})`", text):
            yield str(page.relative_to(ROOT)), inline


@functools.cache
def problem_of(*overrides: str) -> str:
    """Return what is said about a key or a value that does not exist; "" if there is nothing of the kind."""
    try:
        load_recipe(DEMO, overrides)
    except RecipeError as error:
        return "; ".join(problem for problem in error.problems if INVALID.search(problem.partition(": ")[2] or problem))
    return ""


FOUND = list(settings())
FRAGMENTS = list(fragments())


def test_documented_settings_are_many() -> None:
    assert len(FOUND) > 150
    assert len(FRAGMENTS) > 0


@pytest.mark.parametrize("page", sorted({place.partition(":")[0] for place, *_ in FOUND}))
def test_documented_settings_exist_with_their_values(page: str) -> None:
    wrong = []
    for place, key, value, line in FOUND:
        # Tables of results leave out the section of the algorithm
        if not place.startswith(f"{page}:") or REFUSED.search(line):
            continue
        keys = [key, f"algorithm.{key}"] if page.startswith("benchmarks/") else [key]
        problems = [problem_of(f"{each}={value}") for each in keys]
        if all(problems):
            wrong.append(f"{place}: {key}={value}: {problems[0]}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(("page", "block"), FRAGMENTS)
def test_documented_recipe_pieces_can_be_read(page: str, block: str) -> None:
    content = parse_yaml(re.sub(r"\.\.\.", "", block))
    overrides = [f"{key}={_written(value)}" for key, value in flatten_settings(content).items()]
    assert not problem_of(*overrides), page


def _written(value: object) -> str:
    return str(value) if not isinstance(value, str) else repr(value)


@pytest.mark.parametrize("override", ["algorithm.dynamic_sampling=true", "rollout.nothing=1", "roles.x.ranks=2"])
def test_wrong_setting_would_be_found(override: str) -> None:
    assert problem_of(override)


def test_run_folder_page_lists_what_a_resume_may_change() -> None:
    page = (ROOT / "docs/run-folder.md").read_text(encoding="utf-8")
    table = page.split("## What a resume may change")[1].split("Those of the next section")[0]
    listed = set(re.findall(r"`([\w.]+(?:\.\*)?)`", table))
    recipe = load_recipe(DEMO, ["roles.reward.ranks=1"])
    keys = flatten_settings(to_raw(recipe))
    free = {key for key in keys if FREE.fullmatch(key)}
    assert free
    assert {key for key in free if not any(re.fullmatch(each.replace("*", ".*"), key) for each in listed)} == set()
    assert {each for each in listed if not any(FREE.fullmatch(key) for key in (each, each.replace("*", "x")))} == set()
