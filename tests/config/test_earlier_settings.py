"""Recipes of earlier versions, which run folders have, with settings that are elsewhere or gone today."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from hybrid3d.config import RecipeError, load_recipe
from hybrid3d.config.load import with_present_settings
from hybrid3d.config.schema import flatten_settings, read_yaml, to_raw
from hybrid3d.report.run_data import read_run
from hybrid3d.run.identity import _settings_that_differ
from hybrid3d.storage.manifest import Identity

DEMO = Path(__file__).parent / "earlier" / "0.1.0.yaml"  # as 0.1.0 wrote the demo's into a run folder
AHEAD = ["roles.generation.ranks=2", "train.pp=1", "async.max_staleness=1", "algorithm.correction.kind=truncate"]
KL = "algorithm.kl={where: loss, coef: 0.1, estimator: %s, straight_through: %s}"


def settings_of(*overrides: str) -> dict[str, Any]:
    return flatten_settings(to_raw(load_recipe(DEMO, overrides)))


def test_settings_of_0_1_0_keep_their_values() -> None:
    earlier, today = (flatten_settings(raw) for raw in (read_yaml(DEMO), to_raw(load_recipe(DEMO))))
    assert {key: today[key] for key in earlier if key in today} == {k: v for k, v in earlier.items() if k in today}
    gone = {"sync.share_storage", "sync.keep_loader_layout", "sync.anchor_every"}
    merged = {"algorithm.kl.straight_through", "async.keep_cache", "rollout.placement", "reward.shuffle"}
    assert earlier.keys() - today.keys() == gone | merged


def test_checkpoint_of_0_1_0_has_the_settings_of_today() -> None:
    identity = Identity("", "", 0, "digest of 0.1.0", DEMO.read_text(), {})
    assert list(_settings_that_differ(identity, load_recipe(DEMO))) == []
    (told,) = _settings_that_differ(identity, load_recipe(DEMO, ["debug.shuffle_rewards=true", "reward.shuffle=true"]))
    assert told == "  debug.shuffle_rewards is true, the checkpoint was written with false"


def test_report_names_settings_of_earlier_runs_as_today(tmp_path: Path) -> None:
    shutil.copy(DEMO, tmp_path / "recipe.yaml")
    settings = read_run(tmp_path).settings
    assert settings["debug.placement"] == "overlap"
    assert settings.keys() <= flatten_settings(to_raw(load_recipe(DEMO))).keys()


@pytest.mark.parametrize(
    ("overrides", "today"),
    [
        (["rollout.placement=consecutive"], {"debug.placement": "consecutive"}),
        (["rollout.placement=consecutive", "debug.placement=consecutive"], {"debug.placement": "consecutive"}),
        (["reward.shuffle=true"], {"debug.shuffle_rewards": True}),
        ([KL % ("null", "true")], {"algorithm.kl.estimator": "k3+"}),
        ([KL % ("abs", "true")], {"algorithm.kl.estimator": "abs+"}),
        ([KL % ("k2", "true")], {"algorithm.kl.estimator": "k2"}),
        ([KL % ("k3+", "false")], {"algorithm.kl.estimator": "k3+"}),
        ([*AHEAD, "async.partial=continue", "async.keep_cache=true"], {"async.partial": "continue_with_cache"}),
        ([*AHEAD, "async.partial=continue_with_cache"], {"async.partial": "continue_with_cache"}),
        ([*AHEAD, "async.partial=continue", "async.keep_cache=false"], {"async.partial": "continue"}),
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
            "Megatron's memory: leave it out",
        ),
        (
            "sync.anchor_every=5",
            "sync.anchor_every: got 5 (an integer), but there is no such setting any more: all elements are sent only "
            "where changes are not known: leave it out",
        ),
        (
            "debug.placement=consecutive",
            "rollout.placement: got 'overlap' (a string), but this is debug.placement today, and does not go with what "
            "is given",
        ),
        *(
            (override, f"async.keep_cache: got {value}, but this is async.partial=continue_with_cache today, and")
            for override, value in [
                ("async={keep_cache: true}", "True (a boolean)"),
                ("async={keep_cache: true, partial: restart}", "True (a boolean)"),
                ("async={keep_cache: 1, partial: continue}", "1 (an integer)"),
            ]
        ),
        *(
            (KL % (estimator, on), "algorithm.kl.straight_through: got ")
            for estimator, on in [("null", "maybe"), ("false", "true"), ("[k3]", "true"), ("''", "true")]
        ),
    ],
)
def test_earlier_setting_that_has_no_equal_is_told(override: str, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(DEMO, [override])
    assert caught.value.problems[0].startswith(message)


@pytest.mark.parametrize("raw", [{"async": 1, "debug": [], "rollout": None}, {1: 2}, {"algorithm": {"kl": "k3"}}])
def test_value_that_is_no_section_is_left_as_it_is(raw: dict[Any, Any]) -> None:
    problems: list[str] = []
    assert with_present_settings(raw, problems) == raw
    assert problems == []
