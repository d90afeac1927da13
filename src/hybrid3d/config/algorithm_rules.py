"""Checks for combinations of an algorithm's settings that make no sense; each names both values and what would work."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hybrid3d.config.algorithms import TOKEN_ADVANTAGES
from hybrid3d.config.refusals import Refusal, arithmetic, definition

if TYPE_CHECKING:
    from hybrid3d.config.recipe import Recipe

TOKEN_CORRECTIONS = ("truncate", "mask")
OF_TOKENS = ("clip_cov", "kl_cov")  # which select tokens
WITHOUT_RATIO = ("reinforce", "gmpo", "dppo_tv", "dppo_kl")  # or with one of their own


def check_algorithm(recipe: Recipe) -> Iterator[Refusal]:
    """Yield a record of each contradiction between settings of the section `algorithm`, or with `reward`."""
    if recipe.algorithm.uses_pairs:
        yield from _check_pairs(recipe)
    if not recipe.algorithm.generates:
        return
    yield from _check_advantage(recipe)
    yield from _check_loss(recipe)
    if recipe.algorithm.uses_greedy_answers:
        yield from _check_greedy_answers(recipe)
    reward, kl = recipe.reward, recipe.algorithm.kl
    scheduled = any("algorithm.kl.coef" in settings for settings in recipe.schedule.values())
    if reward.coef == kl.coef == recipe.algorithm.entropy_coef == 0 and not scheduled:
        yield definition("reward.coef=0 and algorithm.kl.coef=0 leave nothing to learn from: set one of them above 0")
    if reward.min is not None and reward.max is not None and reward.min >= reward.max:
        yield arithmetic(f"reward.min={reward.min:g} is not below reward.max={reward.max:g}")


def _check_pairs(recipe: Recipe) -> Iterator[Refusal]:
    """Yield what preference pairs cannot be."""
    columns = {
        "data.prompt": recipe.data.prompt,
        "data.chosen": recipe.data.chosen,
        "data.rejected": recipe.data.rejected,
    }
    seen: dict[str, str] = {}
    for setting, column in columns.items():
        if column in seen:
            yield definition(f"{setting}={column} is the column of {seen[column]} too: name the column of each")
        seen.setdefault(column, setting)


def _check_advantage(recipe: Recipe) -> Iterator[Refusal]:
    combined = recipe.algorithm.combination
    scale = f"algorithm.advantage_scale={combined.advantage_scale}"
    if combined.advantage in TOKEN_ADVANTAGES and combined.advantage_scale not in ("none", "whiten"):
        yield definition(
            f"{scale}: with algorithm.advantage={combined.advantage} each token has an advantage of its own, which is "
            "not divided by that of rewards: set whiten or none"
        )
    if combined.advantage_scale == "batch_std" and recipe.sequences_per_step < 2:
        yield arithmetic(
            f"{scale}: the {recipe.sequences_per_step} answer of a step has no standard deviation: set "
            "algorithm.prompts_per_step to 2 or more, or algorithm.advantage_scale to none"
        )


def _check_loss(recipe: Recipe) -> Iterator[Refusal]:
    algorithm = recipe.algorithm
    combined, correction = algorithm.combination, algorithm.correction
    one_ratio, others = "", ""  # what gives all tokens of an answer one ratio, and what would not
    if combined.ratio == "sequence":
        one_ratio, others = "algorithm.ratio=sequence", "algorithm.ratio=sequence_straight_through or token"
    elif combined.policy_loss == "gmpo":
        one_ratio, others = "algorithm.policy_loss=gmpo", "algorithm.policy_loss=ppo"
    if one_ratio and correction.kind in TOKEN_CORRECTIONS:
        yield definition(
            f"algorithm.correction.kind={correction.kind} weights tokens, but with {one_ratio} an answer has one "
            f"ratio: set algorithm.correction.kind=sequence_{correction.kind}, or {others}"
        )
    if one_ratio and algorithm.high_entropy_fraction is not None:
        yield definition(
            f"algorithm.high_entropy_fraction={algorithm.high_entropy_fraction:g} selects tokens, but with "
            f"{one_ratio} an answer has one ratio: set {others}"
        )
    if one_ratio and combined.policy_loss in OF_TOKENS:
        yield definition(
            f"algorithm.policy_loss={combined.policy_loss} selects tokens, but with {one_ratio} an answer has one "
            f"ratio: set {others}"
        )
    if combined.ratio != "token" and combined.policy_loss in WITHOUT_RATIO:
        yield definition(
            f"algorithm.ratio={combined.ratio}: algorithm.policy_loss={combined.policy_loss} does not use it: set "
            "algorithm.ratio=token"
        )
    if correction.bypass and correction.kind not in ("none", "sequence_mean_mask"):
        yield definition(
            f"algorithm.correction.kind={correction.kind}: with algorithm.correction.bypass=true the ratio of "
            f"algorithm.policy_loss={combined.policy_loss} already is that to the policy that sampled: set "
            "algorithm.correction.kind=none or sequence_mean_mask"
        )
    if correction.bypass and combined.policy_loss == "reinforce":
        yield definition(
            "algorithm.correction.bypass=true: algorithm.policy_loss=reinforce has no ratio: leave it out, and set "
            "algorithm.correction.kind=truncate to weight its tokens"
        )
    if combined.policy_loss == "clip_cov" and algorithm.loss.cov_low >= algorithm.loss.cov_high:
        yield arithmetic(
            f"algorithm.loss.cov_low={algorithm.loss.cov_low:g} is not below "
            f"algorithm.loss.cov_high={algorithm.loss.cov_high:g}"
        )
    if combined.policy_loss == "gmpo" and combined.loss_agg_mode != "sequence":
        yield definition(
            f"algorithm.loss_agg_mode={combined.loss_agg_mode}: with algorithm.policy_loss=gmpo an answer has one "
            "loss, which this would multiply by its length: set sequence"
        )


def _check_greedy_answers(recipe: Recipe) -> Iterator[Refusal]:
    """Yield what a greedy answer beside the samples cannot be combined with."""
    advantage = "algorithm.advantage=greedy_answer"
    if recipe.algorithm.combination.dynamic_sampling:
        extra = f"algorithm.dynamic_sampling={recipe.algorithm.combination.dynamic_sampling}"
        yield definition(
            f"{advantage}: {extra} replaces groups of equal rewards, which have advantages here: set it to 0"
        )
