"""What a new kind of an interface costs: each toy is one file. A feature that needs more has found a missing interface.

`toys/negated_source.py` is a source and `toys/doubling_sink.py` a sink, between which two ranks sync;
`toys/vowel_scorer.py` is a scorer, and `toys/margin_loss.py` a policy loss. `toys/second_thoughts.py` is a continuation
of answers, which `tests/generation/test_partial_rollout.py` uses, and `toys/echo_role.py` a role of ranks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from run_ranks import run_ranks

JOBS = Path(__file__).parents[1] / "jobs"
NAMES = ["model.layers.0.weight", "model.layers.1.weight", "model.norm.weight"]
HALF = 6 * 4 * 4  # bytes of what a rank holds of a tensor

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    folder = tmp_path_factory.mktemp("toys")
    run_ranks(JOBS / "use_toys.py", 2, [str(folder)], timeout=120)
    first, second = (json.loads((folder / f"{rank}.json").read_text()) for rank in range(2))
    return first, second


def test_toy_source_is_synced_to_a_toy_sink(ranks: tuple[Any, Any]) -> None:
    for version, (one, other) in enumerate(zip(ranks[0]["synced"], ranks[1]["synced"], strict=True)):
        assert one["right"] == other["right"] == NAMES
        assert (one["version"], other["version"]) == (version, version)
        assert (one["received"], other["received"]) == (0, HALF * len(NAMES)) == (one["bound"], other["bound"])
        assert one["corrupted"] == other["corrupted"] == []


def test_toy_scorer_gives_the_rewards_on_all_ranks(ranks: tuple[Any, Any]) -> None:
    for said in ranks:
        assert said["rewards"] == [5.0, 0.0, 4.0, 0.0]
        assert said["failures"] == {"empty": 1}


def test_toy_loss_moves_the_policy(ranks: tuple[Any, Any]) -> None:
    first, second = ranks
    assert first["loss"] == [pytest.approx([-0.2, -0.5, 0.5])]
    assert first["grad"] == [[-2.0, 0.0, 0.0]]
    assert second["loss"] == [pytest.approx([0.2, -0.1, 0.0])]
    assert second["grad"] == [[1.0, 1.0, 0.0]]
    assert (first["clipped"], second["clipped"]) == (2.0, 0.0)


def test_ranks_with_a_toy_role_do_what_they_are_asked(tmp_path: Path) -> None:
    """Of their own processes, whom the first rank finds by the store, and who prove that they belong to the run."""
    run_ranks(JOBS / "use_toy_role.py", 3, [str(tmp_path / "answer.json")], timeout=120)
    said, busy, events = json.loads((tmp_path / "answer.json").read_text())
    assert said == [[[1.0, 4.0, 1.0], [1.0, 4.0, 2.0]], [[1.0], [2.0]]]
    assert busy == ["time/echo_busy"]
    assert events == []
