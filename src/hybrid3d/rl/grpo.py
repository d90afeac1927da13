"""GRPO's loss on tokens, and how far training and rollout disagree about them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hybrid3d.rl.batch import Rows
from hybrid3d.rl.kl import token_kl
from hybrid3d.rl.losses import policy_loss

TokenLoss = Callable[[Tensor, Rows], tuple[Tensor, dict[str, Tensor]]]
"""From log-probabilities [b, T] of `Rows` of a batch: the loss at each token [b, T], and sums to report."""


def grpo_loss(
    advantages: Tensor,
    mask: Tensor,
    old_logprobs: Tensor | None,
    ref_logprobs: Tensor | None,
    *,
    clip: float,
    kl_estimator: str,
    kl_coef: float,
) -> TokenLoss:
    """The clipped policy loss plus `kl_coef` times the KL to the reference (DeepSeekMath, arXiv 2402.03300, eq. 3).

    The mean over these is one over all tokens of a step (DAPO, arXiv 2503.14476, eq. 8), not one of means per answer.

    Args:
        advantages: [B]. mask, old_logprobs, ref_logprobs: [B, T]; the last two only where the loss is computed, and
            `ref_logprobs` only where there is a reference.
    """

    def loss(logprobs: Tensor, rows: Rows) -> tuple[Tensor, dict[str, Tensor]]:
        assert old_logprobs is not None, "a rank that computes the loss has computed log-probabilities"
        losses, sums = policy_loss(logprobs, old_logprobs[rows], advantages[rows], mask[rows], clip)
        if ref_logprobs is not None:
            kl = token_kl(kl_estimator, logprobs, ref_logprobs[rows], mask[rows])
            losses = losses + kl_coef * kl
            sums["kl"] = kl.detach().sum()
        return losses, sums

    return loss


def sft_loss(logprobs: Tensor, rows: Rows) -> tuple[Tensor, dict[str, Tensor]]:
    """Negative log-likelihood of each token."""
    return -logprobs, {}


def mismatch(logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> tuple[float, float]:
    """How far the trained model and the rollout engine disagree about the sampled tokens; all arguments are [B, T].

    Returns:
        The largest |difference| of a token's log-probability, and the sum over tokens of the k3 estimate of
        KL(rollout || train) (`kl.py`; the tokens were drawn by the rollout engine).
    """
    gap = torch.where(mask.bool(), logprobs - rollout_logprobs, 0.0)
    return float(gap.abs().max()), float((torch.expm1(gap) - gap).sum())
