"""Bounds log-ratios of probabilities; every log-ratio is bounded here before it is exponentiated."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""exp(20) = 4.9e8 is beyond every clip, and finite when squared; float32 overflows at exp(88.8), and inf * 0 is NaN."""


def bounded(log_ratio: Tensor) -> Tensor:
    """Bound log-ratios to +-`MAX_LOG_RATIO`, without gradient beyond the bound; NaN stays NaN.

    `torch.where` is used because the gradient of `clamp` is zero at NaN, which would hide a NaN from the guard.
    """
    limited = log_ratio.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.where(log_ratio.abs() > MAX_LOG_RATIO, limited, log_ratio)
