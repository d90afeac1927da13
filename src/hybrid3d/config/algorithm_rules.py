"""Checks for combinations of an algorithm's settings that make no sense; each names both values and what would work."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hybrid3d.config.algorithms import TOKEN_ADVANTAGES

if TYPE_CHECKING:
    from hybrid3d.config.recipe import Recipe

TOKEN_CORRECTIONS = ("truncate", "mask")
WITHOUT_RATIO = ("reinforce", "gmpo", "dppo_tv", "dppo_kl")  # or with one of their own


def check_algorithm(recipe: Recipe) -> Iterator[str]:
    """Yield a message for each contradiction between settings of the section `algorithm`, or with `reward`."""
    if not recipe.algorithm.generates:
        return
    yield from _check_advantage(recipe)
    yield from _check_loss(recipe)
    if recipe.algorithm.uses_greedy_answers:
        yield from _check_greedy_answers(recipe)
    reward, kl = recipe.reward, recipe.algorithm.kl
    if reward.coef == 0 and kl.coef == 0:
        yield f"reward.coef=0 and algorithm.kl.coef={kl.coef:g} leave nothing to learn from: set one of them above 0"
    if reward.min is not None and reward.max is not None and reward.min >= reward.max:
        yield f"reward.min={reward.min:g} is not below reward.max={reward.max:g}"


def _check_advantage(recipe: Recipe) -> Iterator[str]:
    combined = recipe.algorithm.combination
    advantage, scale = (
        f"algorithm.advantage={combined.advantage}",
        f"algorithm.advantage_scale={combined.advantage_scale}",
    )
    if combined.advantage in TOKEN_ADVANTAGES and combined.advantage_scale not in ("none", "whiten"):
        yield (
            f"{scale}: with {advantage} each token has an advantage of its own, which is not divided by that of "
            "rewards: set whiten or none"
        )


def _check_loss(recipe: Recipe) -> Iterator[str]:
    algorithm = recipe.algorithm
    combined, correction = algorithm.combination, algorithm.correction
    if combined.ratio == "sequence" and correction.kind in TOKEN_CORRECTIONS:
        yield (
            f"algorithm.correction.kind={correction.kind} weights tokens, but with algorithm.ratio=sequence an answer "
            f"has one ratio: set algorithm.correction.kind=sequence_{correction.kind}, or "
            "algorithm.ratio=sequence_straight_through"
        )
    if combined.ratio == "sequence" and algorithm.high_entropy_fraction is not None:
        yield (
            f"algorithm.high_entropy_fraction={algorithm.high_entropy_fraction:g} selects tokens, but with "
            "algorithm.ratio=sequence an answer has one ratio: set algorithm.ratio=sequence_straight_through or token"
        )
    if combined.ratio != "token" and combined.policy_loss in WITHOUT_RATIO:
        yield (
            f"algorithm.ratio={combined.ratio}: algorithm.policy_loss={combined.policy_loss} does not use it: set "
            "algorithm.ratio=token"
        )
    if correction.bypass and correction.kind not in ("none", "sequence_mean_mask"):
        yield (
            f"algorithm.correction.kind={correction.kind}: with algorithm.correction.bypass=true the ratio of "
            f"algorithm.policy_loss={combined.policy_loss} already is that to the policy that sampled: set "
            "algorithm.correction.kind=none or sequence_mean_mask"
        )
    if correction.bypass and combined.policy_loss == "reinforce":
        yield (
            "algorithm.correction.bypass=true: algorithm.policy_loss=reinforce has no ratio: leave it out, and set "
            "algorithm.correction.kind=truncate to weight its tokens"
        )
    if combined.policy_loss == "clip_cov" and algorithm.loss.cov_low >= algorithm.loss.cov_high:
        yield (
            f"algorithm.loss.cov_low={algorithm.loss.cov_low:g} is not below "
            f"algorithm.loss.cov_high={algorithm.loss.cov_high:g}"
        )
    if combined.policy_loss == "gmpo" and combined.loss_agg_mode != "sequence":
        yield (
            f"algorithm.loss_agg_mode={combined.loss_agg_mode}: with algorithm.policy_loss=gmpo an answer has one "
            "loss, which this would multiply by its length: set sequence"
        )


def _check_greedy_answers(recipe: Recipe) -> Iterator[str]:
    """Yield what a greedy answer beside the samples cannot be combined with."""
    advantage = "algorithm.advantage=greedy_answer"
    fix = "set algorithm.advantage=leave_one_out, or leave it out"
    if recipe.reward.model is not None:
        yield f"{advantage}: reward.model={recipe.reward.model} does not score greedy answers: {fix}"
    if recipe.roles.reward.ranks is not None:
        ranks = f"roles.reward.ranks={recipe.roles.reward.ranks}"
        yield f"{advantage}: {ranks} do not score greedy answers: {fix}"
    if recipe.async_.partial is not None:
        partial = f"async.partial={recipe.async_.partial}"
        yield f"{advantage}: with {partial} a prompt's answers are not complete at the same time: {fix}"
    if recipe.rollout is not None and recipe.rollout.agents is not None:
        yield f"{advantage}: rollout.agents make no greedy answers in training: {fix}"
