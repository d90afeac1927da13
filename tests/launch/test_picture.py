"""`plan --picture`: where the picture cannot be written after all, the report is on the terminal nevertheless."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest

from hybrid3d import cli
from test_bad_inputs import work  # noqa: F401 (a fixture)


@pytest.mark.engines
def test_picture_that_fails_costs_no_report(
    work: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(report: Any, path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.chdir(work)
    monkeypatch.setattr("hybrid3d.planning.page.draw", full)
    assert cli.main(["plan", "recipe.yaml", "--json", "--picture", "traffic.svg"]) == cli.FAILED
    out, message = capsys.readouterr()
    assert json.loads(out)["coverage"] == "exact"
    assert "traffic.svg cannot be written: No space left on device" in message
    monkeypatch.undo()
    monkeypatch.chdir(work)
    assert cli.main(["plan", "recipe.yaml", "--json", "--picture", "traffic.svg"]) == cli.DONE
    assert (work / "traffic.svg").read_text().startswith("<?xml")
