"""Selects tokens of a step by a value that each has. Every rank passes the tokens of all, so that layouts agree."""

from __future__ import annotations

import torch
from torch import Tensor


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
