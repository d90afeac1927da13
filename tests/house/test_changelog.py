"""CHANGELOG.md has a section for what is not released yet, and its newest release is this version of the package."""

import datetime
import re
from pathlib import Path

from hybrid3d import __version__

ROOT = Path(__file__).resolve().parents[2]


def test_newest_release_is_this_version() -> None:
    headings = re.findall(r"^## \[(.+?)\](?: - (\S+))?$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == ("Unreleased", "")
    assert headings[1][0] == __version__
    dates = [datetime.date.fromisoformat(date) for _, date in headings[1:]]
    assert dates == sorted(dates, reverse=True)
