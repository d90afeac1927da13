"""Estimators of KL(policy || reference) from tokens that the policy sampled.

John Schulman, "Approximating KL Divergence" (http://joschu.net/blog/kl-approx.html). With x ~ policy and
r = reference(x) / policy(x), each maps log r to an estimate per token. As a loss what counts is the gradient: in
expectation k1's is zero (never use it there), k2's is that of KL(policy || reference), and that of k3, which is GRPO's
choice, is that of KL(reference || policy). In the reward an estimate is multiplied by the gradient of log policy(x): in
expectation k1 gives the gradient of KL(policy || reference), and k2 and k3 hardly any where the two are close, because
they punish a token that has become less likely too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid3d.rl.ratio import bounded


def k3(log_ratio: Tensor) -> Tensor:
    """Estimate KL at each token by `(r - 1) - log r`: unbiased, never negative. The log-ratio is bounded (`ratio.py`).

    DeepSeekMath (arXiv 2402.03300), equation 4. `expm1`, because close to r = 1 the difference r - 1 loses its digits.
    """
    limited = bounded(log_ratio)
    return torch.expm1(limited) - limited


ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda log_ratio: -log_ratio,  # unbiased, high variance, negative half the time
    "k2": lambda log_ratio: log_ratio.square() / 2,  # biased, low variance
    "k3": k3,
}


def token_kl(estimator: str, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """The estimate at each token, [B, T], and zero where `mask` is zero; only k3 is bounded.

    `logprobs` and `ref_logprobs` [B, T] are those of the policy and of the reference; gradients flow into both.
    """
    if estimator not in ESTIMATORS:
        raise ValueError(f"unknown KL estimator {estimator!r}; known: {', '.join(ESTIMATORS)}")
    # Masked before the estimator, not after: what padding holds may overflow in exp, and 0 * inf is NaN in a gradient.
    log_ratio = torch.where(mask.bool(), ref_logprobs - logprobs, 0.0)
    return ESTIMATORS[estimator](log_ratio)


@dataclass
class KlController:
    """The coefficient of the KL, which follows a target where there is one (arXiv 1909.08593, section 2.2).

    `error = clamp(kl / target - 1, -0.2, 0.2)`, then `coef *= 1 + error * answers / horizon`: the paper's gain, 0.1 a
    batch, is a horizon of ten batches.

    Attributes:
        coef: what the KL is multiplied by now.
        target: wanted KL of an answer, nats summed over its tokens; None leaves `coef` as it is.
        horizon: answers.
    """

    coef: float
    target: float | None = None
    horizon: int = 10_000

    def __post_init__(self) -> None:
        self._configured = self.coef, self.target

    def coef_under(self, coef: float) -> float:
        """Return the coefficient that `configure` with this setting would leave, without applying it."""
        return coef if coef != self._configured[0] else self.coef

    def configure(self, coef: float, target: float | None) -> None:
        """Apply the run's settings: one that has changed since it was applied last replaces the current value."""
        coef_before, target_before = self._configured
        if coef != coef_before:
            self.coef = coef
        if target != target_before:
            self.target = target
        self._configured = coef, target

    def restore(self, state: Mapping[str, float | None], coef: float, target: float | None) -> None:
        """Continue from a checkpoint's `state`, saved while these settings were in force."""
        saved = state["coef"]
        assert saved is not None
        self.coef, self.target = saved, state["target"]
        self._configured = coef, target

    @property
    def state(self) -> dict[str, float | None]:
        """What a checkpoint saves, as JSON."""
        return {"coef": self.coef, "target": self.target}

    def observe(self, kl: float, answers: int) -> None:
        """Move the coefficient by a step's mean KL of an answer, over this many answers."""
        if self.target is not None and not math.isnan(kl):  # which would stay in `coef` for good
            error = min(max(kl / self.target - 1, -0.2), 0.2)
            self.coef *= 1 + error * answers / self.horizon
