"""The files that GitHub reads: CI runs `.ci/run`, and the forms ask for what a report needs."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from test_readme import exists, help_of, make_targets, paths, subcommands

ROOT = Path(__file__).resolve().parents[2]
GITHUB = ROOT / ".github"
FORMS = sorted((GITHUB / "ISSUE_TEMPLATE").glob("*.yml"))
PAGES = [*FORMS, GITHUB / "PULL_REQUEST_TEMPLATE.md", ROOT / "SECURITY.md"]


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return found


def test_ci_runs_what_the_repository_runs() -> None:
    job = read(GITHUB / "workflows/ci.yml")["jobs"]["test"]
    assert job["timeout-minutes"] == 90
    *actions, last = job["steps"]
    assert last["run"] == ".ci/run"
    assert (ROOT / ".ci/run").stat().st_mode & 0o100
    assert all(action["uses"].rpartition("@v")[2].isdigit() for action in actions)  # pinned to a major version
    assert [action["with"]["python-version"] for action in actions if "python" in action["uses"]] == ["3.13"]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.stem)
def test_form_can_be_read(form: Path) -> None:
    content = read(form)
    assert {"name", "description", "body"} <= set(content)
    asked = [part for part in content["body"] if part["type"] != "markdown"]
    assert all(part["attributes"]["label"] for part in asked)
    identifiers = [part["id"] for part in asked]
    assert len(set(identifiers)) == len(identifiers) > 0


def test_bug_comes_with_what_it_takes_to_find_it() -> None:
    text = (GITHUB / "ISSUE_TEMPLATE/bug.yml").read_text(encoding="utf-8")
    assert all(
        word in text for word in ("hybrid3d doctor", "recipe.yaml", "events.jsonl", "metrics.jsonl", "logs/rank-")
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_github_files_name_only_what_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert [name for name in sorted(paths(text)) if not exists(name)] == []
    assert make_targets(text) <= {"test", "gpu-check"}
    assert {name for name in subcommands(text) if help_of(name).returncode != 0} == set()
