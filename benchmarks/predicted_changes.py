"""Predicts which fraction of bfloat16 weights the next update changes, from their magnitudes, lr and Adam's state.

The neighbours of a bfloat16 weight w with 2^e <= |w| < 2^(e+1) are d = 2^(e-7) away (below a power of two, d / 2). The
weight changes when the optimizer's float32 weight crosses the middle between two of them. Steps of Adam (arXiv
1412.6980, algorithm 1), s = lr |m^| / (sqrt(v^) + eps), are mostly much smaller than d: that is why an update of RL
changes about 1 % of the weights (arXiv 2602.03839).

Assumptions, for a run that loaded its weights in bfloat16 and has made n updates:

- Each float32 weight started at a bfloat16 value, d / 2 from both middles, and has moved since in the direction of the
  next step, by a distance that is uniform between 0 and 2 n s: n s on average. For n above h = (1 + b) / (1 - b), where
  b is Adam's beta1, updates are nearly independent, and sqrt(n h) replaces n.
- The next step is r = s sqrt(a(n + 1) / a(n)), a(n) = (1 + b^n) / (1 - b^n): a(n) / h is the variance of m^ if
  gradients are independent with variance 1.

The weight changes with the probability that a step of r from a uniform point of [0, 2 n s] crosses a middle. This is 1
or 0 before the first update (whether lr > d / 2), and tends to min(1, s / d) as n grows.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

MANTISSA = 0x7F  # bits of a bfloat16
MAX_DISTANCE = 2.0**16  # in spacings: from here on, positions between two middles are uniform


def adam_step_size(
    exp_avg: Tensor, exp_avg_sq: Tensor, step: int, *, lr: float, beta1: float, beta2: float, eps: float
) -> Tensor:
    """Return the size of the last update of each weight, by the state of Adam after it, without weight decay.

    Args:
        step: Adam's number of updates, 1 or more.
    """
    denominator = (exp_avg_sq / (1 - beta2**step)).sqrt_().add_(eps)
    return exp_avg.abs().mul_(lr / (1 - beta1**step)).div_(denominator)


def change_probability(weights: Tensor, step_size: Tensor | float, updates: float, beta1: float = 0.9) -> Tensor:
    """Return the probability that the next update changes each weight; the mean is the fraction that will change.

    Args:
        weights: [...], bfloat16.
        step_size: [...], of the last update; before the first one lr, which is the size of Adam's first step.
        updates: made since the weights were loaded in bfloat16; `math.inf` for the limit of a long run.
        beta1: Adam's.
    """
    magnitude = weights.detach().abs()
    bits = magnitude.view(torch.int16)
    spacing = (bits + 1).view(torch.bfloat16).float() - magnitude.float()
    step = torch.as_tensor(step_size, dtype=torch.float32, device=weights.device).expand_as(spacing)
    found = _crossing(step / spacing, updates, beta1)
    powers_of_two = (bits & MANTISSA) == 0
    below = _crossing(2 * step[powers_of_two] / spacing[powers_of_two], updates, beta1)
    found[powers_of_two] = (found[powers_of_two] + below) / 2
    return found


def _crossing(last: Tensor, updates: float, beta1: float) -> Tensor:
    """Return the probability that the next step crosses a middle; `last` is the size of the last step in spacings."""
    if updates == 0:
        return (last > 0.5).float()
    if math.isinf(updates):
        return last.clamp(max=1)
    steps = min(updates, math.sqrt(updates * (1 + beta1) / (1 - beta1)))
    end = (2 * steps * last).clamp_(1 / MAX_DISTANCE, MAX_DISTANCE) + 0.5  # counted from the middle behind the start
    n = beta1**updates
    shrinks = math.sqrt((1 + beta1 * n) / (1 - beta1 * n) * (1 - n) / (1 + n))
    step = (last * shrinks).clamp_(max=1)  # the last part of a spacing, of this length, crosses
    whole = end.floor()
    crossing = whole * step + (end - whole - 1 + step).clamp_(min=0) - (step - 0.5).clamp_(min=0)
    return crossing / (end - 0.5)
