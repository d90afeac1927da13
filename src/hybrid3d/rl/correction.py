"""Measures the mismatch between training and rollout log-probabilities, and computes weights that correct for it.

Two implementations of one model give a token slightly different probabilities, so even fresh samples are slightly
off-policy. `ratio` below is train / rollout, for the policy before the update.

Tokens are selected among those of all ranks, so that layouts agree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass
from itertools import pairwise

import torch
from torch import Tensor

from hybrid3d.rl.kl import k3
from hybrid3d.rl.losses import bounded

QUANTILES = (0.5, 0.99)
QUARTERS = 4


def mismatch(logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> tuple[dict[str, float], float]:
    """Measure how far the trained model and the rollout engine disagree on sampled tokens; all arguments are [B, T].

    Returns the maximum (`max`) and the quantiles (`p50`, `p99`) of a token's |log-probability difference|; and the sum
    over tokens of the k3 estimate of KL(rollout || train) (`kl.py`; the rollout engine sampled the tokens).
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
    """Return the sum of the policy's tokens' `gaps` in each quarter of the `longest` that an answer may be, [4].

    Gaps are |log-probability differences|, [B, T], 0 where the mask is. A token's position is its number among the
    policy's tokens of its answer.
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


def _rejected(ratio: Tensor, low: float, high: float) -> Tensor:
    return torch.where(ratio.isnan(), ratio, ((ratio >= low) & (ratio <= high)).to(ratio.dtype))


CORRECTIONS: dict[str, tuple[str, Callable[[Tensor, float, float], Tensor]]] = {
    # name: (whether the ratio is that of a token, of a whole answer, or an answer's mean; the transform of the ratio)
    # Truncated importance sampling: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL
    # Training". For whole answers, and with a mask: Liu et al. 2025, "When Speed Kills Stability".
    "truncate": ("token", _truncated),
    "sequence_truncate": ("answer", _truncated),
    # IcePop (arXiv 2510.18855): tokens outside [low, high] get no weight.
    "mask": ("token", _masked),
    "sequence_mask": ("answer", _masked),
    # Liu et al. 2025, part 3: answers are rejected by the geometric mean of their tokens' ratios
    "sequence_mean_mask": ("mean", _rejected),
}


def correction_weights(
    name: str, logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, low: float, high: float
) -> Tensor:
    """Return the weight of each token's loss by one of `CORRECTIONS`, [B, T], without gradient; zero where `mask` is.

    Log-ratios of tokens and of whole answers are bounded (`losses.py`). The ratio's bounds are `low` and `high`;
    truncation uses the upper one only.
    """
    level, transform = CORRECTIONS[name]
    gap = torch.where(mask.bool(), (logprobs - rollout_logprobs).detach(), 0.0)
    if level != "token":
        tokens = mask.sum(1, keepdim=True).clamp(min=1) if level == "mean" else 1
        gap = (gap.sum(1, keepdim=True) / tokens).expand_as(gap)
    return transform(bounded(gap).exp(), low, high) * mask


@dataclass(frozen=True)
class OffPolicy:
    """Adds up how far the samples are from the policy, over rows and ranks."""

    tokens: float = 0.0
    answers: float = 0.0
    weight: float = 0.0  # sum over tokens of the correction's weights
    trained: float = 0.0  # the number of the tokens that have one
    ratio: float = 0.0  # sum over tokens of train / rollout
    ratio_squared: float = 0.0
    answer_ratio_squared: float = 0.0  # sum over answers of the square of the product of its tokens' ratios
    train_perplexity: float = 0.0  # sum over answers of exp(-mean log-probability)
    rollout_perplexity: float = 0.0

    @classmethod
    def of(
        cls,
        logprobs: Tensor,
        rollout_logprobs: Tensor,
        mask: Tensor,
        weights: Tensor | None = None,
        trained: float | None = None,
    ) -> OffPolicy:
        """Return the sums of log-probabilities and weights [B, T]; rows without tokens are not answers.

        If `trained` is None, all tokens in `mask` have a weight.
        """
        weight = 0.0 if weights is None else float(weights.sum())
        rows = mask.bool().any(1)
        mask, logprobs, rollout = mask[rows].double(), logprobs[rows].double(), rollout_logprobs[rows].double()
        logprobs, rollout = (torch.where(mask.bool(), values, 0.0) for values in (logprobs, rollout))
        gap, lengths = logprobs - rollout, mask.sum(1)
        ratio = bounded(gap).exp() * mask
        sums = (
            ratio.sum(),
            ratio.square().sum(),
            (2 * bounded(gap.sum(1))).exp().sum(),
            (-logprobs.sum(1) / lengths).exp().sum(),
            (-rollout.sum(1) / lengths).exp().sum(),
        )
        tokens = float(mask.sum())
        trained = tokens if trained is None else trained
        return cls(tokens, float(len(mask)), weight, trained, *(float(value) for value in sums))

    def __add__(self, other: OffPolicy) -> OffPolicy:
        return OffPolicy(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of all that was added.

        `ess` is the effective sample size, as a fraction of the tokens (Kong 1992); `chi2_token` and `chi2_answer`
        estimate the chi-squared divergence of training from rollout, E[r^2] - 1.
        """
        if not self.answers:
            return {}
        return {
            "ess": self.ratio**2 / (self.tokens * self.ratio_squared) if self.ratio_squared else 0.0,
            "chi2_token": self.ratio_squared / self.tokens - 1,
            "chi2_answer": self.answer_ratio_squared / self.answers - 1,
            "train_perplexity": self.train_perplexity / self.answers,
            "rollout_perplexity": self.rollout_perplexity / self.answers,
        }


def highest(values: Tensor, count: int) -> Tensor:
    """Return which of the values [N] are the `count` highest; those that equal the lowest of them are selected too."""
    if not values.numel():
        return torch.zeros_like(values, dtype=torch.bool)
    return values >= values.topk(count).values[-1]


def high_entropy(entropies: Tensor, fraction: float) -> Tensor:
    """Return which of the entropies [N] are not below the quantile `1 - fraction` of them (arXiv 2506.01939, eq. 7)."""
    return highest(entropies, int(fraction * (entropies.numel() - 1)) + 1)


def high_covariance(values: Tensor, fraction: float) -> Tensor:
    """Return the given fraction of the values [N], the highest, at least one (arXiv 2505.22617, equation 13)."""
    return highest(values, max(1, int(fraction * values.numel())))


def covariances(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """Return each token's share [N] of the covariance of log-probability and advantage (arXiv 2505.22617, eq. 10)."""
    return (advantages - advantages.mean()) * (logprobs - logprobs.mean())


def within(values: Tensor, low: float, high: float, fraction: float, seed: int) -> Tensor:
    """Return a random choice among the values [N] that are between `low` and `high`, without these two.

    It has this fraction of all N, at least one, and at most those that there are (arXiv 2505.22617, equation 11).
    """
    candidates = ((values > low) & (values < high)).nonzero().flatten()
    order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(seed))
    selected = torch.zeros_like(values, dtype=torch.bool)
    selected[candidates[order[: max(1, int(fraction * values.numel()))]]] = True
    return selected
