"""The table of algorithms, and what recipes say of it."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch

from hybrid3d.config import Algorithm, RecipeError, load_recipe
from hybrid3d.config.algorithms import (
    ALGORITHMS,
    FROM_DATA,
    REFERENCE_FREE_LOSSES,
    Advantage,
    Aggregation,
    Combination,
    LossKind,
    Name,
    PreferenceLossType,
    Ratio,
)
from hybrid3d.rl import losses, objective, preferences
from hybrid3d.rl.advantages import ADVANTAGES, Answers, answer_advantages
from hybrid3d.rl.correction import CORRECTIONS
from hybrid3d.rl.kl import ESTIMATORS

ROOT = Path(__file__).resolve().parents[2]


def algorithm(**settings: Any) -> Algorithm:
    return replace(load_recipe(ROOT / "recipes/demo-cpu.yaml").algorithm, **settings)


def test_recipes_know_the_rows_and_no_others() -> None:
    hints = get_type_hints(Algorithm)
    assert {*get_args(Name)} == {*ALGORITHMS, *FROM_DATA}
    assert {*get_args(get_type_hints(hints["correction"])["kind"])} == {*CORRECTIONS, "none"}
    estimators, _ = get_args(get_type_hints(hints["kl"])["estimator"])  # or None
    assert {*get_args(estimators)} == {*ESTIMATORS, *(f"{name}+" for name in ESTIMATORS if name != "k2")}


def test_recipes_know_what_is_implemented() -> None:
    assert {*get_args(Advantage)} == {*ADVANTAGES}
    assert {*get_args(LossKind)} == {*objective.POLICY_LOSSES}
    assert get_args(Aggregation) == get_args(losses.Aggregation)
    assert get_args(Ratio) == get_args(objective.Ratio)
    assert get_args(PreferenceLossType) == tuple(preferences.PREFERENCE_LOSSES)
    assert REFERENCE_FREE_LOSSES == preferences.REFERENCE_FREE


@pytest.mark.parametrize("name", ALGORITHMS)
def test_advantages_that_compare_answers_need_two_of_them(name: str) -> None:
    given = algorithm(name=name)
    answers = Answers(torch.tensor([1.0, 0.0]), 1, lengths=torch.ones(2), baselines=torch.zeros(2))
    combined = given.combination
    if given.uses_groups:
        with pytest.raises(ValueError, match="2 or more samples of a prompt"):
            answer_advantages(combined.advantage, combined.advantage_scale, answers)
    else:
        assert answer_advantages(combined.advantage, combined.advantage_scale, answers).tolist() == [1.0, 0.0]


def test_setting_replaces_what_the_name_stands_for() -> None:
    given = algorithm(name="gspo", clip=None, advantage="leave_one_out", advantage_scale="none")
    assert given.combination == replace(ALGORITHMS["gspo"], advantage="leave_one_out", advantage_scale="none")
    assert algorithm(name="dapo", clip=None).combination.clip_high == 0.28
    assert algorithm(name="dapo", clip=0.1).combination.clip_high is None  # the bound on both sides
    assert algorithm(name="dapo", clip=0.1, clip_high=0.3).combination.clip_high == 0.3
    assert algorithm(name="sft", clip=None).combination == Combination()


def test_algorithm_tells_if_it_needs_critic_groups_or_greedy_answers() -> None:
    assert algorithm(name="grpo", advantage="gae", advantage_scale="whiten").uses_critic
    assert not algorithm(name="ppo", advantage="returns").uses_critic
    assert not algorithm(name="sft").uses_critic
    assert algorithm(name="ppo", advantage="group_mean").uses_groups
    assert algorithm(name="remax").uses_greedy_answers
    assert not algorithm(name="remax", advantage="group_mean").uses_greedy_answers


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            "name=gspo correction.kind=truncate",
            "algorithm.correction.kind=truncate weights tokens, but with algorithm.ratio=sequence an answer has one "
            "ratio: set algorithm.correction.kind=sequence_truncate, or algorithm.ratio=sequence_straight_through or "
            "token",
        ),
        (
            "ratio=sequence high_entropy_fraction=0.2",
            "algorithm.high_entropy_fraction=0.2 selects tokens, but with algorithm.ratio=sequence an answer has one "
            "ratio: set algorithm.ratio=sequence_straight_through or token",
        ),
        (
            "name=ppo advantage_scale=group_std",
            "algorithm.advantage_scale=group_std: with algorithm.advantage=gae each token has an advantage of its own, "
            "which is not divided by that of rewards: set whiten or none",
        ),
        (
            "name=gmpo ratio=sequence",
            "algorithm.ratio=sequence: algorithm.policy_loss=gmpo does not use it: set algorithm.ratio=token",
        ),
        (
            "name=gmpo loss_agg_mode=token",
            "algorithm.loss_agg_mode=token: with algorithm.policy_loss=gmpo an answer has one loss, which this would "
            "multiply by its length: set sequence",
        ),
        (
            "name=gmpo correction.kind=mask",
            "algorithm.correction.kind=mask weights tokens, but with algorithm.policy_loss=gmpo an answer has one "
            "ratio: set algorithm.correction.kind=sequence_mask, or algorithm.policy_loss=ppo",
        ),
        (
            "name=clip_cov ratio=sequence",
            "algorithm.policy_loss=clip_cov selects tokens, but with algorithm.ratio=sequence an answer has one ratio: "
            "set algorithm.ratio=sequence_straight_through or token",
        ),
        (
            "kl={where: loss, coef: 1, estimator: k2, ratio_weighted: true}",
            "algorithm.kl.ratio_weighted=true: its gradient is that of the KL with algorithm.kl.estimator=k1 or k3 "
            "only, not with k2",
        ),
        (
            "name=remax dynamic_sampling=2",
            "algorithm.advantage=greedy_answer: algorithm.dynamic_sampling=2 replaces groups of equal rewards, which "
            "have advantages here: set it to 0",
        ),
        (
            "correction.kind=truncate correction.bypass=true",
            "algorithm.correction.kind=truncate: with algorithm.correction.bypass=true the ratio of "
            "algorithm.policy_loss=ppo already is that to the policy that sampled: set algorithm.correction.kind=none "
            "or sequence_mean_mask",
        ),
        (
            "name=gpg correction.bypass=true",
            "algorithm.correction.bypass=true: algorithm.policy_loss=reinforce has no ratio: leave it out, and set "
            "algorithm.correction.kind=truncate to weight its tokens",
        ),
        (
            "name=clip_cov loss.cov_low=6",
            "algorithm.loss.cov_low=6 is not below algorithm.loss.cov_high=5",
        ),
        (
            "name=sapo clip=0.2",
            "algorithm.clip=0.2 has no effect: algorithm.policy_loss=sapo does not use it: leave it out, or set it to "
            "null",
        ),
        (
            "loss.tau_negative=2",
            "algorithm.loss.tau_negative=2 has no effect: algorithm.policy_loss=ppo does not use it: leave it out, or "
            "set it to 1.05",
        ),
    ],
)
def test_combinations_that_make_no_sense(given: str, said: str) -> None:
    settings = re.split(" (?=[a-z_.]+=)", given)
    overrides = ["algorithm.clip=null", *(f"algorithm.{setting}" for setting in settings)]
    with pytest.raises(RecipeError) as error:
        load_recipe(ROOT / "recipes/demo-cpu.yaml", overrides)
    assert error.value.problems == (said,)


@pytest.mark.parametrize(
    "given",
    [
        ("reward.model=build/reward",),
        ("roles.reward.ranks=1",),
        ("rollout.agents={}", "reward.max_failures=0.5"),
        ("async={max_staleness: 2, partial: continue}", "algorithm.correction.kind=truncate"),
    ],
)
def test_greedy_answer_is_an_answer_like_others(given: tuple[str, ...]) -> None:
    """It is generated, and scored, wherever the samples are."""
    overrides = ["algorithm.name=remax", *given]
    assert load_recipe(ROOT / "recipes/demo-cpu.yaml", overrides).algorithm.uses_greedy_answers


def test_rewards_are_bounded_from_both_sides() -> None:
    with pytest.raises(RecipeError, match=r"reward\.min=1 is not below reward\.max=0"):
        load_recipe(ROOT / "recipes/demo-cpu.yaml", ["reward.min=1", "reward.max=0"])
