"""The policy's log-probabilities before an update, and what is measured with them.

They take a pass of their own, unless the update's forward pass is the only one and nothing needs them before: then that
pass computes them. The two passes compute the same, so that the first update's ratio is 1 with either.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid3d.config import Recipe
from hybrid3d.rl.batch import Rows
from hybrid3d.rl.correction import OffPolicy, correction_weights, mismatch, mismatch_by_position, tokens_by_position
from hybrid3d.run.metrics import StepMetrics
from hybrid3d.trainer.step_experience import Experience


def come_from_update(step: int, recipe: Recipe) -> bool:
    """Return whether the update of a step computes them: it is the only one, and they are not needed before.

    It depends on the step and its settings only, so that a replay, or a run that goes on, does the same passes.
    """
    algorithm, replays = recipe.algorithm, recipe.train.router_replay != "none"  # of what the pass before has recorded
    updates = algorithm.epochs * algorithm.minibatches if step < recipe.run.steps else 0
    if recipe.algorithm.uses_critic and step < recipe.critic.warmup_steps:
        updates = 0
    rewards_need_them = algorithm.kl.where == "reward"
    tokens_are_selected = algorithm.high_entropy_fraction is not None or algorithm.combination.policy_loss in (
        "clip_cov",
        "kl_cov",
    )
    weights_are_compared = algorithm.correction.kind != "none" and algorithm.correction.normalize
    return updates == 1 and not (replays or rewards_need_them or tokens_are_selected or weights_are_compared)


class FillOldLogprobs:
    """Fills in an experience's `old` and `correction` with the log-probabilities of a micro batch, as they come."""

    def __init__(self, experience: Experience, recipe: Recipe):
        self._experience, self._recipe = experience, recipe

    def __call__(self, logprobs: Tensor, rows: Rows) -> None:
        """Fill in those of these rows of the batch, [b, T]."""
        experience = self._experience
        assert experience.old is not None, "on ranks with the output layer"
        experience.old[rows] = logprobs
        if experience.correction is not None:
            experience.correction[rows] = weights_of(experience, logprobs, rows, self._recipe)


def weights_of(experience: Experience, logprobs: Tensor, rows: Rows, recipe: Recipe) -> Tensor:
    """Return the weights of `algorithm.correction` for these log-probabilities of rows of the batch, [b, T]."""
    setting, rollout, mask = recipe.algorithm.correction, experience.rollout[rows], experience.mask[rows]
    return correction_weights(setting.kind, logprobs, rollout, mask, setting.low, setting.high)


def off_policy(experience: Experience) -> OffPolicy:
    """Return how far this rank's samples are from the policy."""
    assert experience.old is not None, "on a rank that reports"
    mask, trained = experience.batch.response_mask, float(experience.mask.sum())
    return OffPolicy.of(experience.old, experience.rollout, mask, experience.correction, trained)


def measure_mismatch(experience: Experience, recipe: Recipe) -> StepMetrics:
    """Return this rank's share of the metrics of the mismatch, on a rank that reports.

    It is that of all tokens that the policy generated, whether they are trained or not; the weights are of those that
    are.
    """
    assert experience.old is not None, "on a rank that reports"
    assert recipe.rollout is not None, "samples were generated"
    mask, metrics, tokens = experience.batch.response_mask, StepMetrics(), int(experience.lengths.sum())
    found, divergence = mismatch(experience.old, experience.rollout, mask)
    metrics.maxima |= {f"mismatch/logprob_abs_{name}": value for name, value in found.items()}
    gaps = torch.where(mask.bool(), experience.old - experience.rollout, 0.0).abs()
    metrics.sums["mismatch/kl"] = divergence / tokens
    metrics.sums["mismatch/logprob_abs_mean"] = float(gaps.sum(dtype=torch.float64)) / tokens
    longest = recipe.rollout.max_new_tokens
    by_position = mismatch_by_position(gaps, mask, longest).tolist()
    for i, in_quarter in enumerate(tokens_by_position(experience.lengths, longest)):
        if in_quarter:
            metrics.sums[f"mismatch/logprob_abs_quarter_{i + 1}"] = by_position[i] / in_quarter
    if experience.correction is not None:
        trained = max(1, int(experience.trained_lengths.sum()))
        metrics.sums["mismatch/weight"] = float(experience.correction.sum()) / trained
    return metrics
