"""Measures the mismatch between training and rollout log-probabilities, and corrects for it.

Two implementations of one model give a token slightly different probabilities, so even fresh samples are slightly
off-policy. `ratio` below is train / rollout, for the policy before the update.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from hybrid3d.rl.kl import k3
from hybrid3d.rl.ratio import bounded

QUANTILES = (0.5, 0.99)
QUARTERS = 4


def mismatch(logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> tuple[dict[str, float], float]:
    """Measure how far the trained model and the rollout engine disagree on sampled tokens; all arguments are [B, T].

    Returns:
        The maximum (`max`) and the quantiles (`p50`, `p99`) of a token's |log-probability difference|; and the sum over
        tokens of the k3 estimate of KL(rollout || train) (`kl.py`; the rollout engine sampled the tokens).
    """
    gap = torch.where(mask.bool(), logprobs - rollout_logprobs, 0.0)
    differences = gap.abs()[mask.bool()].float()
    if not differences.numel():
        return {"max": 0.0} | {_percent(q): 0.0 for q in QUANTILES}, 0.0
    ordered = differences.sort().values
    stats = {"max": float(ordered[-1])}  # `torch.quantile` refuses more than 16 million values
    stats |= {_percent(q): float(ordered[min(len(ordered) - 1, int(q * len(ordered)))]) for q in QUANTILES}
    return stats, float(k3(gap).sum())


def mismatch_by_position(gaps: Tensor, mask: Tensor, longest: int) -> Tensor:
    """Return the sum of the policy's tokens' `gaps` in each quarter of the longest answer, [4].

    Args:
        gaps: |log-probability difference| of each token, [B, T]; 0 where the mask is.
        mask: the policy's tokens, [B, T]; a token's position is its number among those of its answer.
        longest: the most tokens that an answer may have.
    """
    quarter = ((mask.long().cumsum(1) - 1).clamp(min=0) * QUARTERS // longest).clamp(max=QUARTERS - 1)
    return torch.zeros(QUARTERS, dtype=torch.float64).index_add_(
        0, quarter.flatten().cpu(), gaps.flatten().double().cpu()
    )


def tokens_by_position(lengths: Tensor, longest: int) -> list[int]:
    """Return how many tokens of answers of these lengths are in each quarter of the longest answer."""
    starts = [-(-longest * quarter // QUARTERS) for quarter in range(QUARTERS)] + [longest]
    return [int((lengths.clamp(low, high) - low).sum()) for low, high in pairwise(starts)]


def _percent(quantile: float) -> str:
    return f"p{quantile * 100:g}"


def _truncated(ratio: Tensor, low: float, high: float) -> Tensor:
    return ratio.clamp(max=high)


def _masked(ratio: Tensor, low: float, high: float) -> Tensor:
    return torch.where((ratio < low) | (ratio > high), 0.0, ratio)  # NaN stays NaN


CORRECTIONS: dict[str, tuple[bool, Callable[[Tensor, float, float], Tensor]]] = {
    # name: (whether the ratio is that of the whole answer, the transform of the ratio)
    # Truncated importance sampling: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL
    # Training". For whole answers, and with a mask: Liu et al. 2025, "When Speed Kills Stability".
    "truncate": (False, _truncated),
    "sequence_truncate": (True, _truncated),
    # IcePop (arXiv 2510.18855): tokens outside [low, high] get no weight.
    "mask": (False, _masked),
    "sequence_mask": (True, _masked),
}


def correction_weights(
    name: str, logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, low: float, high: float
) -> Tensor:
    """Return the weight of each token's loss, [B, T], without gradient; zero where `mask` is zero.

    Log-ratios of tokens and of whole answers are bounded (`ratio.py`).

    Args:
        name: a key of `CORRECTIONS`.
        low, high: bounds of the ratio; truncation uses the upper one only.
    """
    per_answer, transform = CORRECTIONS[name]
    gap = torch.where(mask.bool(), (logprobs - rollout_logprobs).detach(), 0.0)
    if per_answer:
        gap = gap.sum(1, keepdim=True).expand_as(gap)
    return transform(bounded(gap).exp(), low, high) * mask
