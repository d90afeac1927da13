"""Implements estimators of KL(policy || reference) from tokens that the policy sampled, and the KL controller.

John Schulman, "Approximating KL Divergence" (http://joschu.net/blog/kl-approx.html). With x ~ policy and
r = reference(x) / policy(x), each maps log r to an estimate per token. In the loss only the gradient matters: its
expectation is zero for k1 (so never use k1 there, but k1+: a `+` gives an estimator k2's gradient), the gradient of
KL(policy || reference) for k2, and the gradient of KL(reference || policy) for k3, which GRPO uses. In the reward an
estimate is multiplied by the gradient of log policy(x): in expectation k1 gives the gradient of
KL(policy || reference), while k2 and k3 give almost none where the two policies are close, because they also penalize a
token that has become less likely.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid3d.rl.losses import bounded


def k3(log_ratio: Tensor) -> Tensor:
    """Estimate KL at each token by `(r - 1) - log r`: unbiased, never negative. The log-ratio is bounded (`losses.py`).

    DeepSeekMath (arXiv 2402.03300), equation 4. `expm1` is used because r - 1 loses precision close to r = 1.
    """
    limited = bounded(log_ratio)
    return torch.expm1(limited) - limited


ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda log_ratio: -log_ratio,  # unbiased, high variance, negative half the time
    "k2": lambda log_ratio: log_ratio.square() / 2,  # biased, low variance
    "k3": k3,
    "abs": torch.abs,
}


def token_kl(
    estimator: str, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, clamp: float | None = None
) -> Tensor:
    """Estimate the KL at each token, [B, T]; zero where `mask` is zero. Only k3 is bounded without `clamp`.

    Gradients flow into both log-probabilities [B, T]. The estimator is one of `ESTIMATORS` (ValueError: it is not);
    with a `+` after its name, as in verl, its gradient is that of k2. `clamp` bounds the absolute value of an estimate,
    which has no gradient beyond.
    """
    name, is_straight_through = estimator.removesuffix("+"), estimator.endswith("+")
    if name not in ESTIMATORS:
        raise ValueError(f"unknown KL estimator {estimator!r}; known: {', '.join(ESTIMATORS)}")
    # The mask is applied before the estimator: padding may overflow in exp, and 0 * inf is NaN in the gradient.
    log_ratio = torch.where(mask.bool(), ref_logprobs - logprobs, 0.0)
    estimate = ESTIMATORS[name](log_ratio)
    if is_straight_through:
        gradient = ESTIMATORS["k2"](log_ratio)
        estimate = estimate.detach() + gradient - gradient.detach()
    if clamp is not None:  # not by `clamp` alone, whose gradient is zero at NaN
        estimate = torch.where(estimate.abs() > clamp, estimate.detach().clamp(-clamp, clamp), estimate)
    return estimate


@dataclass
class KlController:
    """Holds the KL coefficient and adapts it to a target if there is one (arXiv 1909.08593, section 2.2).

    `error = clamp(kl / target - 1, -0.2, 0.2)`, then `coef *= 1 + error * answers / horizon`: the paper's gain of 0.1
    per batch is a horizon of ten batches.
    """

    coef: float
    target: float | None = None  # KL of an answer, in nats summed over its tokens; None keeps `coef` constant
    horizon: int = 10_000  # time constant of the adaptation, in answers

    def __post_init__(self) -> None:
        self._configured = self.coef, self.target

    def coef_under(self, coef: float) -> float:
        """Return the coefficient that `configure` with this setting would leave, without applying it."""
        return coef if coef != self._configured[0] else self.coef

    def configure(self, coef: float, target: float | None) -> None:
        """Apply the run's settings: a setting that changed since the last call replaces the current value."""
        coef_before, target_before = self._configured
        if coef != coef_before:
            self.coef = coef
        if target != target_before:
            self.target = target
        self._configured = coef, target

    def restore(self, state: Mapping[str, float | None], coef: float, target: float | None) -> None:
        """Continue from a checkpoint's `state`, which was saved under these settings."""
        saved = state["coef"]
        assert saved is not None
        self.coef, self.target = saved, state["target"]
        self._configured = coef, target

    @property
    def state(self) -> dict[str, float | None]:
        """What a checkpoint saves, as JSON values."""
        return {"coef": self.coef, "target": self.target}

    def observe(self, kl: float, answers: int) -> None:
        """Adapt the coefficient to the mean KL per answer of a step with this many answers."""
        if self.target is not None and not math.isnan(kl):  # a NaN would stay in `coef`
            error = min(max(kl / self.target - 1, -0.2), 0.2)
            self.coef *= 1 + error * answers / self.horizon
