"""The messages that `docs/troubleshooting.md` quotes are those that are printed, and the settings and events exist."""

from __future__ import annotations

import re

import pytest

from commands import ROOT

PAGE = (ROOT / "docs/troubleshooting.md").read_text()
SOURCES = "\n".join(path.read_text() for path in sorted((ROOT / "src/hybrid3d").rglob("*.py")))
RECIPE, FOLDER = (ROOT / "docs/recipe.md").read_text(), (ROOT / "docs/run-folder.md").read_text()

MESSAGES = re.findall(r"^\| `([^`]+)`[ A-Z]*\|", PAGE, re.MULTILINE)
SETTINGS = sorted(
    set(re.findall(r"`((?:train|rollout|run|reward|data|async|algorithm|optimizer|model)(?:\.\w+)+)", PAGE))
)
EVENTS = sorted(set(re.findall(r"events? `(\w+)`", PAGE)))
METRICS = sorted(set(re.findall(r"`((?:sync|time|rollout|reward|mismatch)/\w+)`", PAGE)))


def test_troubleshooting_page_has_some_of_each_kind() -> None:
    assert min(len(MESSAGES), len(SETTINGS), len(EVENTS), len(METRICS)) > 5


@pytest.mark.parametrize("message", MESSAGES)
def test_quoted_messages_are_in_the_sources(message: str) -> None:
    strings = re.sub(r'"\n\s*f?"', "", SOURCES)  # a string that goes on in the next line
    assert message in strings


@pytest.mark.parametrize("setting", SETTINGS)
def test_quoted_settings_exist(setting: str) -> None:
    section, _, key = setting.rpartition(".")
    rows = RECIPE.split(f"\n## {section}\n")[1].split("\n## ")[0]
    assert f"| `{key}`" in rows


@pytest.mark.parametrize("name", EVENTS + METRICS)
def test_quoted_events_and_metrics_are_described(name: str) -> None:
    assert f"`{name}`" in FOLDER
