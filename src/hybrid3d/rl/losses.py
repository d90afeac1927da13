"""Losses per token, and the sum that Megatron divides.

A step's loss is a mean over all response tokens of its *global* batch. So each micro batch of each data-parallel rank
gives its sum and its number of tokens, and Megatron divides once, at the end (`calculate_per_token_loss`): the same
loss over any split. (A mean of means weighs a token by the company it keeps.) Tensors are [B, T], aligned as
in `batch.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """The sum of `values` where `mask` is not zero, a scalar; what padding holds may be anything, NaN included."""
    return torch.where(mask.bool(), values, 0.0).sum()


def policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, clip: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped surrogate, negated: `-min(r A, clamp(r, 1 - clip, 1 + clip) A)` (arXiv 1707.06347, equation 7).

    Args:
        logprobs: [B, T], of the policy that is trained; gradients flow into these only.
        old_logprobs: [B, T], of the policy that sampled, as it was before the step.
        advantages: [B], one for all tokens of a sequence.
        mask: [B, T], 1 at the tokens that count.
        clip: how far the ratio r = exp(logprobs - old_logprobs) may move from 1.

    Returns:
        The loss at each token, [B, T], zero where `mask` is zero; and *sums over tokens*, detached scalars, which are
        added over parts and divided by the global token count as the loss is: `ratio`; `clip_fraction`, tokens at which
        the clamp took the gradient away; `old_kl`, the k3 estimate (`kl.py`) of KL(old policy || policy).
    """
    if advantages.shape != logprobs.shape[:1]:
        raise ValueError(f"expected advantages [{logprobs.shape[0]}], one a sequence, got {tuple(advantages.shape)}")
    # Masked before exp, not after: what padding holds may overflow there, and 0 * inf is NaN in the gradient.
    log_ratio = torch.where(mask.bool(), logprobs - old_logprobs.detach(), 0.0)
    ratio = log_ratio.exp()
    advantage = advantages.detach()[:, None]
    surrogate = ratio * advantage
    clipped = ratio.clamp(1 - clip, 1 + clip) * advantage
    with torch.no_grad():
        stats = {
            "ratio": (ratio * mask).sum(),
            "clip_fraction": ((clipped < surrogate) * mask).sum(),
            "old_kl": (torch.expm1(log_ratio) - log_ratio).sum(),
        }
    return -torch.minimum(surrogate, clipped) * mask, stats
