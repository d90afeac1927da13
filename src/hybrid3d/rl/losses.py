"""Losses per token, and the one way in which they become a number.

A step's loss is a mean over all response tokens of its *global* batch: `masked_mean` divides a part's sum by the count
of the whole. So the parts add up to the same loss over any split into micro batches and data-parallel ranks. (A mean of
means weighs a token by the company it keeps.) Tensors are [B, T], aligned as in `batch.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def masked_mean(values: Tensor, mask: Tensor, tokens: int) -> Tensor:
    """This part's share of the mean over the global batch: `sum(values where mask) / tokens`, a scalar.

    `tokens` is the sum of `mask` over every micro batch of every rank; the mean is the *sum* of all parts' shares.
    """
    if tokens < 1:
        raise ValueError(f"a mean over {tokens} tokens: the global batch has no response tokens")
    return torch.where(mask.bool(), values, 0.0).sum() / tokens


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


def sft_loss(logprobs: Tensor, mask: Tensor, tokens: int) -> Tensor:
    """This part's share of the mean negative log-likelihood over the `tokens` of the global batch, a scalar."""
    return masked_mean(-logprobs, mask, tokens)
