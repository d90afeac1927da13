"""Implements losses per token, which are summed here and divided once by Megatron.

The loss of a step is a mean over all response tokens of its *global* batch. Each micro batch of each data-parallel rank
returns its sum and its number of tokens, and Megatron divides once, at the end (`calculate_per_token_loss`), so the
loss does not depend on the split. (In a mean of means, a token's weight would depend on its micro batch.) Other means
are obtained by weighting the losses first, see `answer_weights`. Tensors are [B, T], aligned as in `batch.py`.
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
    """Return the sum of `values` where `mask` is not zero, a scalar; padding may hold any value, also NaN."""
    return torch.where(mask.bool(), values, 0.0).sum()


def answer_weights(
    loss_agg_mode: Aggregation, lengths: Tensor, max_tokens: int, answers: Tensor | None = None
) -> Tensor:
    """Return the weight of each answer's token losses that turns their mean over all tokens into `loss_agg_mode`.

    Args:
        loss_agg_mode: `token`, the mean over all tokens (DAPO, arXiv 2503.14476, equation 8); `sequence`, the mean of
            each answer's mean (GRPO, arXiv 2402.03300, equation 3); `constant`, the sum divided by
            answers x `max_tokens`, whatever their lengths (Dr. GRPO, arXiv 2503.20783, section 3.2).
        lengths: [B], number of loss tokens of each sequence of the update, over all ranks.
        max_tokens: the maximum number of tokens of an answer.
        answers: [B], a number of the answer that each sequence belongs to; None if each is an answer of its own.

    Returns:
        [B]; with `sequence`, zero for an answer without tokens.
    """
    if answers is not None:
        numbers, index = answers.unique(return_inverse=True)
        totals = torch.zeros(len(numbers), dtype=lengths.dtype).index_add(0, index, lengths)
        return answer_weights(loss_agg_mode, totals, max_tokens)[index]
    per_answer = lengths.sum() / len(lengths)
    if loss_agg_mode == "sequence":
        return torch.where(lengths > 0, per_answer / lengths.clamp(min=1), 0.0)
    return torch.full(lengths.shape, float(per_answer) / max_tokens if loss_agg_mode == "constant" else 1.0)


def log_ratios(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, level: Ratio) -> Tensor:
    """Return log(policy / old policy) at each token, [B, T], bounded (`ratio.py`), zero where `mask` is zero.

    At level `sequence` the value at every token is the mean over its answer (GSPO, arXiv 2507.18071, equation 7), and
    its gradient is with respect to the token's own log-probability only (GSPO-token, in the same paper). So a token
    whose loss is multiplied by zero has no gradient; if all tokens of an answer have the same weight, the gradient is
    that of the shared mean.
    """
    # The mask is applied before exp: padding may overflow there, and 0 * inf is NaN in the gradient.
    log_ratio = bounded(torch.where(mask.bool(), logprobs - old_logprobs.detach(), 0.0))
    if level == "sequence":
        zero = log_ratio - log_ratio.detach()  # with the gradient of the token's own log-probability
        log_ratio = zero + log_ratio.detach().sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1) * mask
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
        old_logprobs: [B, T], of the policy before the step, which generated the samples.
        advantages: [B, T].
        mask: [B, T], 1 at the tokens in the loss.
        clip: how far the ratio r = exp(`log_ratios`) may move from 1.
        clip_high: the upper bound if it differs from `clip` (DAPO, arXiv 2503.14476, equation 10).
        dual_clip: above 1; where A < 0 the surrogate is bounded below by `dual_clip` A, so that a large ratio cannot
            make an arbitrarily large update (arXiv 1912.09729, equation 5).
        ratio_level: as in `log_ratios`.

    Returns:
        The loss at each token, [B, T], zero where `mask` is zero; and *sums over tokens*, detached scalars, which are
        added over micro batches and divided by the global token count as the loss is: `ratio`; `clip_fraction`, tokens
        whose gradient the clip removed, and `dual_clip_fraction`, those whose gradient the dual clip removed;
        `approx_kl`, the k3 estimate (`kl.py`) of KL(old policy || policy).

    Raises:
        ValueError: the shapes of `advantages` and `logprobs` differ.
    """
    if advantages.shape != logprobs.shape:
        raise ValueError(f"expected advantages {tuple(logprobs.shape)}, one per token, got {tuple(advantages.shape)}")
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
    """Return half the squared error of a critic, with values clipped to within `clip` of the old ones.

    The larger of the clipped and the unclipped error counts. This is the loss of PPO's first implementation
    ("Implementation Matters in Deep RL", arXiv 2005.12729, section 2, item 1). All tensors are [B, T]; gradients
    flow into `values` only. `clip=None` does not clip.

    Returns:
        The loss at each token, and sums over tokens: `value_clip_fraction`, `value`, `value_error` (squared).
    """
    in_loss = mask.bool()
    values, old = torch.where(in_loss, values, 0.0), torch.where(in_loss, old_values.detach(), 0.0)
    targets = torch.where(in_loss, returns.detach(), 0.0)
    error = (values - targets).square()
    losses, clipped = error, torch.zeros_like(in_loss)
    if clip is not None:
        # The value itself is clamped, so that a value within the bounds stays exact: old + (values - old) rounds it.
        limited = (values.clamp(old - clip, old + clip) - targets).square()
        losses, clipped = torch.maximum(error, limited), limited > error
    stats = {"value_clip_fraction": clipped.sum(), "value": values.detach().sum(), "value_error": error.detach().sum()}
    return 0.5 * losses * mask, stats
