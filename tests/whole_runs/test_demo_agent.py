"""The demo of an agent, as `make demo-agent` runs it: a program with OpenAI's client and a calculator is trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from commands import ROOT, python, read_rows

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(3600)]


def test_agent_learns_which_calculation_the_words_require(tmp_path: Path) -> None:
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    python(tmp_path, "examples/demo_agent.py", timeout=3000)
    rows = read_rows(tmp_path / "runs/demo-agent")
    accuracy = {row["step"]: row["eval/accuracy"] for row in rows if "eval/accuracy" in row}
    assert 0.1 <= accuracy[0] <= 0.6
    assert accuracy[max(accuracy)] >= 0.9
    assert all(row["reward/failures"] == 0 for row in rows)
    assert all(row["mismatch/logprob_abs_max"] <= 1e-3 for row in rows)
    answers = [json.loads(line)["answer"] for line in (tmp_path / "runs/demo-agent/samples.jsonl").open()]
    assert sum("=" in answer and ">>" in answer for answer in answers) > len(answers) / 2  # the calculator was used
