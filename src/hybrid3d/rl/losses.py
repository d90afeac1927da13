"""Losses per token, and the sum that Megatron divides.

A step's loss is a mean over all response tokens of its *global* batch. So each micro batch of each data-parallel rank
gives its sum and its number of tokens, and Megatron divides once, at the end (`calculate_per_token_loss`): the same
loss over any split. (A mean of means weighs a token by the company it keeps.) Another mean is this one of losses with
weights, see `answer_weights`. Tensors are [B, T], aligned as in `batch.py`.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from hybrid3d.rl.kl import k3
from hybrid3d.rl.ratio import bounded

Aggregation = Literal["token", "sequence", "constant"]
Ratio = Literal["token", "sequence"]


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """The sum of `values` where `mask` is not zero, a scalar; what padding holds may be anything, NaN included."""
    return torch.where(mask.bool(), values, 0.0).sum()


def answer_weights(loss_agg_mode: Aggregation, lengths: Tensor, longest: int) -> Tensor:
    """What each answer's token losses are multiplied by, so that their mean over all tokens is the one asked for.

    Args:
        loss_agg_mode: `token`, the mean over all tokens (DAPO, arXiv 2503.14476, equation 8); `sequence`, the mean of
            each answer's mean (GRPO, arXiv 2402.03300, equation 3); `constant`, the sum over answers x `longest`,
            whatever their lengths (Dr. GRPO, arXiv 2503.20783, section 3.2).
        lengths: [B], loss tokens of every answer of the update, over all ranks.
        longest: tokens that an answer may have.

    Returns:
        [B]; zero for an answer without tokens.
    """
    per_answer = lengths.sum() / len(lengths)
    if loss_agg_mode == "sequence":
        return torch.where(lengths > 0, per_answer / lengths.clamp(min=1), 0.0)
    return torch.full(lengths.shape, float(per_answer) / longest if loss_agg_mode == "constant" else 1.0)


def log_ratios(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, level: Ratio) -> Tensor:
    """log(policy / old policy) at each token, [B, T], bounded (`ratio.py`), zero where `mask` is zero.

    At the level of the `sequence` every token has the mean of its answer's as its value (GSPO, arXiv 2507.18071,
    equation 7), and a gradient with respect to its own log-probability alone (GSPO-token, in the same paper). So a
    token whose loss is multiplied by zero has no gradient; if all tokens of an answer have the same weight, the
    gradient is that of the shared mean.
    """
    # Masked before exp, not after: what padding holds may overflow there, and 0 * inf is NaN in the gradient.
    log_ratio = bounded(torch.where(mask.bool(), logprobs - old_logprobs.detach(), 0.0))
    if level == "sequence":
        own = log_ratio - log_ratio.detach()  # zero, with the gradient of the token's log-probability
        log_ratio = own + log_ratio.detach().sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1) * mask
    return log_ratio


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip: float,
    clip_high: float | None = None,
    dual_clip: float | None = None,
    ratio_level: Ratio = "token",
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped surrogate, negated: `-min(r A, clamp(r, 1 - clip, 1 + clip) A)` (arXiv 1707.06347, equation 7).

    Args:
        logprobs: [B, T], of the policy that is trained; gradients flow into these only.
        old_logprobs: [B, T], of the policy that sampled, as it was before the step.
        advantages: [B, T].
        mask: [B, T], 1 at the tokens that count.
        clip: how far the ratio r = exp(`log_ratios`) may move from 1.
        clip_high: how far up, where it is not as far (DAPO, arXiv 2503.14476, equation 10).
        dual_clip: where A < 0 the surrogate is at least `dual_clip` A, above 1: a ratio that ran away cannot make an
            update of any size (arXiv 1912.09729, equation 5).
        ratio_level: as in `log_ratios`.

    Returns:
        The loss at each token, [B, T], zero where `mask` is zero; and *sums over tokens*, detached scalars, which are
        added over parts and divided by the global token count as the loss is: `ratio`; `clip_fraction`, tokens at which
        the clamp took the gradient away, and `dual_clip_fraction`, those at which the second did; `approx_kl`, the k3
        estimate (`kl.py`) of KL(old policy || policy).
    """
    if advantages.shape != logprobs.shape:
        raise ValueError(f"expected advantages {tuple(logprobs.shape)}, one a token, got {tuple(advantages.shape)}")
    log_ratio = log_ratios(logprobs, old_logprobs, mask, ratio_level)
    ratio = log_ratio.exp()
    advantage = torch.where(mask.bool(), advantages.detach(), 0.0)
    surrogate = ratio * advantage
    clipped = ratio.clamp(1 - clip, 1 + (clip if clip_high is None else clip_high)) * advantage
    objective = torch.minimum(surrogate, clipped)
    with torch.no_grad():
        plain = log_ratio if ratio_level == "token" else log_ratios(logprobs, old_logprobs, mask, "token")
        stats = {
            "ratio": (ratio * mask).sum(),
            "clip_fraction": ((clipped < surrogate) * mask).sum(),
            "approx_kl": k3(plain).sum(),
        }
    if dual_clip is not None:
        floor = dual_clip * advantage
        stats["dual_clip_fraction"] = ((advantage < 0) & (objective < floor)).sum()
        objective = torch.where(advantage < 0, torch.maximum(objective, floor), objective)
    return -objective * mask, stats


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Half the squared error of a critic, whose values may move by `clip` in a step: the larger error counts.

    The loss of PPO's first implementation ("Implementation Matters in Deep RL", arXiv 2005.12729, section 2, item 1).
    All tensors [B, T]; gradients flow into `values` only.

    Returns:
        The loss at each token, and sums over tokens: `value_clip_fraction`, `value`, `value_error` (squared).
    """
    inside = mask.bool()
    values, old = torch.where(inside, values, 0.0), torch.where(inside, old_values.detach(), 0.0)
    wanted = torch.where(inside, returns.detach(), 0.0)
    error = (values - wanted).square()
    losses, clipped = error, torch.zeros_like(inside)
    if clip is not None:
        # Of the value itself, which it leaves as it is inside: old + (values - old) differs from it by rounding.
        limited = (values.clamp(old - clip, old + clip) - wanted).square()
        losses, clipped = torch.maximum(error, limited), limited > error
    stats = {"value_clip_fraction": clipped.sum(), "value": values.detach().sum(), "value_error": error.detach().sum()}
    return 0.5 * losses * mask, stats
