"""Recipes of earlier versions, which run folders have, with settings that are elsewhere or gone today."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hybrid3d.config import RecipeError, load_recipe
from hybrid3d.config.schema import flatten_settings, read_yaml, to_raw

EARLIER = sorted(
    (Path(__file__).parent / "earlier").glob("*.yaml")
)  # as that version wrote its demo's into a run folder
DEMO = EARLIER[0]


def settings_of(*overrides: str) -> dict[str, Any]:
    return flatten_settings(to_raw(load_recipe(DEMO, overrides)))


@pytest.mark.parametrize("path", EARLIER, ids=lambda path: path.stem)
def test_settings_of_earlier_version_keep_their_values(path: Path) -> None:
    earlier, today = (flatten_settings(raw) for raw in (read_yaml(path), to_raw(load_recipe(path))))
    assert {key: today[key] for key in earlier if key in today} == {k: v for k, v in earlier.items() if k in today}
    gone = {"sync.share_storage", "sync.keep_loader_layout", "sync.anchor_every"}
    merged = {"algorithm.kl.straight_through", "async.keep_cache", "rollout.placement", "reward.shuffle"}
    assert earlier.keys() - today.keys() == gone | merged


@pytest.mark.parametrize(
    ("overrides", "today"),
    [
        (["rollout.placement=consecutive"], {"debug.placement": "consecutive"}),
        (["reward.shuffle=true"], {"debug.shuffle_rewards": True}),
        (["algorithm.kl={where: loss, coef: 0.1, straight_through: true}"], {"algorithm.kl.estimator": "k3+"}),
        (
            ["algorithm.kl={where: loss, coef: 0.1, estimator: abs, straight_through: true}"],
            {"algorithm.kl.estimator": "abs+"},
        ),
        (
            ["algorithm.kl={where: loss, coef: 0.1, estimator: k2, straight_through: true}"],
            {"algorithm.kl.estimator": "k2"},
        ),
        (
            [
                "roles.generation.ranks=2",
                "train.pp=1",
                "async.max_staleness=1",
                "algorithm.correction.kind=truncate",
                "async.partial=continue",
                "async.keep_cache=true",
            ],
            {"async.partial": "continue_with_cache"},
        ),
        (
            [
                "roles.generation.ranks=2",
                "train.pp=1",
                "async.max_staleness=1",
                "algorithm.correction.kind=truncate",
                "async.partial=continue",
                "async.keep_cache=false",
            ],
            {"async.partial": "continue"},
        ),
    ],
)
def test_earlier_setting_is_read_as_today_s(overrides: list[str], today: dict[str, Any]) -> None:
    found = settings_of(*overrides)
    assert {key: found[key] for key in today} == today


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "sync.share_storage=true",
            "sync.share_storage: got True (a boolean), but there is no such setting any more: no tensor of vLLM uses "
            "Megatron's memory",
        ),
        (
            "sync.anchor_every=5",
            "sync.anchor_every: got 5 (an integer), but there is no such setting any more: all elements are sent only "
            "where changes are not known",
        ),
        ("algorithm.kl.straight_through=maybe", "algorithm.kl.straight_through: unknown key"),
        ("debug.placement=overlap", "rollout.placement: unknown key"),
    ],
)
def test_earlier_setting_that_has_no_equal_is_told(override: str, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(DEMO, [override])
    (problem,) = caught.value.problems
    assert problem.startswith(message)
