"""Implements sums and means over tokens of losses, which are summed here and divided once by Megatron.

The loss of a step is a mean over all response tokens of its *global* batch. Each micro batch of each data-parallel rank
returns its sum and its number of tokens, and Megatron divides once, at the end (`calculate_per_token_loss`), so the
loss does not depend on the split. (In a mean of means, a token's weight would depend on its micro batch.) Other means
are obtained by weighting the losses first, see `answer_weights`. Tensors are [B, T], aligned as in `batch.py`.

Every log-ratio of probabilities is bounded here before it is exponentiated.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Aggregation = Literal["token", "sequence", "sequence_sum", "constant"]


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Return the sum of `values` where `mask` is not zero, a scalar; padding may hold any value, also NaN."""
    return torch.where(mask.bool(), values, 0.0).sum()


def answer_weights(
    loss_agg_mode: Aggregation,
    lengths: Tensor,
    max_tokens: int,
    answers: Tensor | None = None,
    trained: Tensor | None = None,
) -> Tensor:
    """Return the weight of each answer's token losses that turns their mean over all tokens into `loss_agg_mode`.

    Args:
        loss_agg_mode: `token`, the mean over all tokens (DAPO, arXiv 2503.14476, equation 8); `sequence`, the mean of
            each answer's mean (GRPO, arXiv 2402.03300, equation 3); `sequence_sum`, the mean of each answer's sum;
            `constant`, the sum divided by answers x `max_tokens`, whatever their lengths (Dr. GRPO, arXiv 2503.20783,
            section 3.2).
        lengths: [B], number of loss tokens of each sequence of the update, over all ranks.
        max_tokens: the maximum number of tokens of an answer.
        answers: [B], a number of the answer that each sequence belongs to, negative where it belongs to none and only
            fills a batch; None if each is an answer of its own.
        trained: [B], whether each sequence is trained on: the others are not part of the mean; None if all are.

    Returns:
        [B]; zero for sequences that are not trained on, if none has a token, and with `sequence` for an answer that
        has none.
    """
    numbers = torch.arange(len(lengths)) if answers is None else answers
    chosen = numbers >= 0 if trained is None else trained & (numbers >= 0)
    if not int(lengths[chosen].sum()):
        return torch.zeros(lengths.shape)
    index = numbers[chosen].unique(return_inverse=True)[1]
    totals = torch.zeros(int(index.max()) + 1, dtype=lengths.dtype).index_add(0, index, lengths[chosen])
    per_answer = totals.sum() / len(totals)
    if loss_agg_mode == "sequence":
        of_answers = torch.where(totals > 0, per_answer / totals.clamp(min=1), 0.0)
    else:
        weight = {"token": 1.0, "sequence_sum": float(per_answer), "constant": float(per_answer) / max(max_tokens, 1)}
        of_answers = torch.full(totals.shape, weight[loss_agg_mode])
    weights = torch.zeros(lengths.shape, dtype=of_answers.dtype)
    weights[chosen] = of_answers[index] * (lengths.sum() / totals.sum())
    return weights


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return half the squared error of a critic at each token, with values clipped to within `clip` of the old ones.

    The larger of the clipped and the unclipped error counts. This is the loss of PPO's first implementation
    ("Implementation Matters in Deep RL", arXiv 2005.12729, section 2, item 1). All tensors are [B, T]; gradients
    flow into `values` only. The second value has sums over tokens: `value_clip_fraction`, `value`, `value_error`
    (squared).
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


MAX_LOG_RATIO = 20.0
"""exp(20) = 4.9e8 is beyond every clip, and finite when squared; float32 overflows at exp(88.8), and inf * 0 is NaN."""


def bounded(log_ratio: Tensor) -> Tensor:
    """Bound log-ratios to +-`MAX_LOG_RATIO`, without gradient beyond the bound; NaN stays NaN.

    `torch.where` is used because the gradient of `clamp` is zero at NaN, which would hide a NaN from the guard.
    """
    limited = log_ratio.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.where(log_ratio.abs() > MAX_LOG_RATIO, limited, log_ratio)
