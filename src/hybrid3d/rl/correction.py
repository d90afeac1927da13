"""Where the rollout engine and the trained model disagree: by how much, and what to make of a sample that says so.

Two implementations of one model give a token slightly different probabilities, so samples are a little off-policy
whatever their age. `ratio` below is train / rollout, of the policy before the update.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hybrid3d.rl.kl import k3
from hybrid3d.rl.ratio import bounded

QUANTILES = (0.5, 0.99)


def mismatch(logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> tuple[dict[str, float], float]:
    """How far the trained model and the rollout engine disagree about the sampled tokens; all arguments are [B, T].

    Returns:
        Of |difference of a token's log-probability| the largest (`max`) and quantiles (`p50`, `p99`); and the sum over
        tokens of the k3 estimate of KL(rollout || train) (`kl.py`; the tokens were drawn by the rollout engine).
    """
    gap = torch.where(mask.bool(), logprobs - rollout_logprobs, 0.0)
    sizes = gap.abs()[mask.bool()].float()
    if not sizes.numel():
        return {"max": 0.0} | {_percent(q): 0.0 for q in QUANTILES}, 0.0
    ordered = sizes.sort().values
    found = {"max": float(ordered[-1])}  # `torch.quantile` refuses more than 16 million values
    found |= {_percent(q): float(ordered[min(len(ordered) - 1, int(q * len(ordered)))]) for q in QUANTILES}
    return found, float(k3(gap).sum())


def _percent(quantile: float) -> str:
    return f"p{quantile * 100:g}"


def _truncated(ratio: Tensor, low: float, high: float) -> Tensor:
    return ratio.clamp(max=high)


def _masked(ratio: Tensor, low: float, high: float) -> Tensor:
    return torch.where((ratio < low) | (ratio > high), 0.0, ratio)  # NaN stays NaN


CORRECTIONS: dict[str, tuple[bool, Callable[[Tensor, float, float], Tensor]]] = {
    # name: (whether the ratio is that of the whole answer, what is made of it)
    # Truncated importance sampling: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL
    # Training". Of whole answers, and masked: Liu et al. 2025, "When Speed Kills Stability".
    "truncate": (False, _truncated),
    "sequence_truncate": (True, _truncated),
    # IcePop (arXiv 2510.18855): what is outside [low, high] teaches nothing.
    "mask": (False, _masked),
    "sequence_mask": (True, _masked),
}


def correction_weights(
    name: str, logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, low: float, high: float
) -> Tensor:
    """What the loss at each token is multiplied by, [B, T], no gradient; zero where `mask` is zero.

    Log-ratios, of whole answers too, are bounded (`ratio.py`).

    Args:
        name: of `CORRECTIONS`. low, high: bounds of the ratio; truncation needs the upper one only.
    """
    whole, weigh = CORRECTIONS[name]
    gap = torch.where(mask.bool(), (logprobs - rollout_logprobs).detach(), 0.0)
    if whole:
        gap = gap.sum(1, keepdim=True).expand_as(gap)
    return weigh(bounded(gap).exp(), low, high) * mask
