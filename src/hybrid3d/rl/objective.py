"""Defines the objectives of updates: each returns the loss at each token of a micro batch, given a model's outputs.

A policy loss is a function from `TokenTerms` to the objective at each token, [B, T], which is negated and summed as
`losses.py` says, and to whether the clip took away the token's gradient. To add one, add a function and its row in
`POLICY_LOSSES`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from hybrid3d.rl.batch import Rows
from hybrid3d.rl.kl import k3, token_kl
from hybrid3d.rl.losses import bounded, value_loss

Ratio = Literal["token", "sequence", "sequence_straight_through"]


@dataclass(frozen=True, kw_only=True)
class LossSettings:
    """The settings of a policy loss, by the names of the recipe's section `algorithm` (`config/sections/algorithm.py`).

    Where the advantage is negative, the objective is bounded below by `dual_clip` (above 1) times it, so that a large
    ratio cannot make an arbitrarily large update (arXiv 1912.09729, equation 5).
    """

    kind: str = "ppo"  # a key of `POLICY_LOSSES`
    ratio: Ratio = "token"
    clip: float = 0.2
    clip_high: float | None = None  # None if it is `clip`
    dual_clip: float | None = None
    tau_positive: float = 1.0
    tau_negative: float = 1.05
    cov_kl_coef: float = 1.0
    max_ratio: float = 20.0

    @property
    def bounds(self) -> tuple[float, float]:
        """Return how far the ratio may move below and above 1."""
        return self.clip, self.clip if self.clip_high is None else self.clip_high


@dataclass(frozen=True, eq=False)
class TokenTerms:
    """Holds what a policy loss is computed from, [B, T]; all are zero where the mask is."""

    logprobs: Tensor  # of the policy, with gradient
    old_logprobs: Tensor  # of the policy before the step
    log_ratio: Tensor  # log(policy / old policy) as `log_ratios` returns it, with gradient
    advantage: Tensor  # without gradient
    mask: Tensor  # 1 at the tokens in the loss
    selected: Tensor | None = None  # whether `clip_cov` excludes the token, or `kl_cov` penalizes it (`correction.py`)

    @property
    def ratio(self) -> Tensor:
        return self.log_ratio.exp()

    def is_selected(self) -> Tensor:
        assert self.selected is not None, "a loss by covariance needs the tokens that were selected"
        return self.selected.bool()


Objective = tuple[Tensor, dict[str, Tensor]]
"""The objective at each token, and masks [B, T] of tokens to count, by the metric's name."""


def log_ratios(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, level: Ratio) -> Tensor:
    """Return log(policy / old policy) at each token, [B, T], bounded (`losses.py`), zero where `mask` is zero.

    At level `sequence` the value at every token is the mean over its answer (GSPO, arXiv 2507.18071, equation 7), with
    the gradient of that mean. At level `sequence_straight_through` the gradient is with respect to the token's own
    log-probability only (GSPO-token, in the same paper): a token whose loss is multiplied by zero has no gradient. If
    all tokens of an answer have the same weight, both have the same gradient.
    """
    # The mask is applied before exp: padding may overflow there, and 0 * inf is NaN in the gradient.
    log_ratio = bounded(torch.where(mask.bool(), logprobs - old_logprobs.detach(), 0.0))
    if level == "token":
        return log_ratio
    mean = answer_means(log_ratio, mask)
    return mean if level == "sequence" else log_ratio - log_ratio.detach() + mean.detach()


def answer_means(values: Tensor, mask: Tensor) -> Tensor:
    """Return at each token [B, T] the mean of `values` over its answer; zero where `mask` is zero."""
    masked = torch.where(mask.bool(), values, 0.0)
    return masked.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1) * mask


def ppo(terms: TokenTerms, settings: LossSettings) -> Objective:
    """Return `min(r A, clamp(r, 1 - clip, 1 + clip_high) A)` (arXiv 1707.06347, equation 7; arXiv 2503.14476)."""
    low, high = settings.bounds
    surrogate = terms.ratio * terms.advantage
    clipped = terms.ratio.clamp(1 - low, 1 + high) * terms.advantage
    objective, counts = torch.minimum(surrogate, clipped), {"clip_fraction": clipped < surrogate}
    if settings.dual_clip is not None:
        floor, negative = settings.dual_clip * terms.advantage, terms.advantage < 0
        counts["dual_clip_fraction"] = negative & (objective < floor)
        objective = torch.where(negative, torch.maximum(objective, floor), objective)
    return objective, counts


def cispo(terms: TokenTerms, settings: LossSettings) -> Objective:
    """Return `clamp(r) A log p`, r without gradient, so that no token loses its own (arXiv 2506.13585, equation 4)."""
    low, high = settings.bounds
    ratio = terms.ratio.detach()
    weight = ratio.clamp(1 - low, 1 + high)
    return weight * terms.advantage * terms.logprobs, {"clip_fraction": weight != ratio}


def sapo(terms: TokenTerms, settings: LossSettings) -> Objective:
    """Return `4 / tau sigmoid(tau (r - 1)) A`, a gate in place of a clip (arXiv 2511.20347, equations 5 and 6)."""
    tau = torch.where(terms.advantage > 0, settings.tau_positive, settings.tau_negative)
    return torch.sigmoid(tau * (terms.ratio - 1)) * (4 / tau) * terms.advantage, {}


def gmpo(terms: TokenTerms, settings: LossSettings) -> Objective:
    """Return `A` times the geometric mean of an answer's clipped ratios, at each of its tokens (arXiv 2507.20673).

    Log-ratios are clipped to -clip and clip_high, where that lowers the objective (equation 4). The advantage is the
    mean over the answer's tokens.
    """
    low, high = settings.bounds
    clipped = terms.log_ratio.clamp(-low, high)
    limited = torch.where(
        terms.advantage > 0, torch.minimum(terms.log_ratio, clipped), torch.maximum(terms.log_ratio, clipped)
    )
    objective = answer_means(limited, terms.mask).exp() * answer_means(terms.advantage, terms.mask)
    return objective, {"clip_fraction": (limited != terms.log_ratio) & (terms.advantage != 0)}


def reinforce(terms: TokenTerms, settings: LossSettings) -> Objective:
    """Return `A log p` (Williams 1992; GPG, arXiv 2504.02546, equation 5): no ratio and no clip."""
    return terms.advantage * terms.logprobs, {}


def clip_cov(terms: TokenTerms, settings: LossSettings) -> Objective:
    """Return PPO's objective, without gradient at the selected tokens (Clip-Cov, arXiv 2505.22617, equation 11)."""
    objective, counts = ppo(terms, settings)
    selected = terms.is_selected()
    return torch.where(selected, 0.0, objective), counts | {"cov_fraction": selected}


def kl_cov(terms: TokenTerms, settings: LossSettings) -> Objective:
    """Return `r A`, less a penalty on |log r| at the selected tokens (KL-Cov, arXiv 2505.22617, equation 14)."""
    selected = terms.is_selected()
    penalty = torch.where(selected, settings.cov_kl_coef * terms.log_ratio.abs(), 0.0)
    return terms.ratio * terms.advantage - penalty, {"cov_fraction": selected}


def dppo_tv(terms: TokenTerms, settings: LossSettings) -> Objective:
    """Return the objective of `_dppo` with the difference of the token's two probabilities as divergence."""
    return _dppo(terms, settings, (terms.logprobs.exp() - terms.old_logprobs.exp()).abs())


def dppo_kl(terms: TokenTerms, settings: LossSettings) -> Objective:
    """Return the objective of `_dppo` with KL(old || policy) between "this token" and "another one" as divergence."""
    old, new = terms.old_logprobs.double(), terms.logprobs.double()
    others = torch.log1p(-old.exp().clamp(max=1 - 1e-8)) - torch.log1p(-new.exp().clamp(max=1 - 1e-8))
    divergence = old.exp() * (old - new) + (1 - old.exp()) * others
    return _dppo(terms, settings, divergence.to(terms.logprobs.dtype))


def _dppo(terms: TokenTerms, settings: LossSettings, divergence: Tensor) -> Objective:
    """Return `min(r, max_ratio) A log p`, r without gradient, for tokens within the trust region (arXiv 2602.04879).

    A token is outside of it if its probability has moved in the direction of its advantage, and the divergence of the
    two policies exceeds `clip` (lower probability) or `clip_high` (higher).
    """
    low, high = settings.bounds
    moved = terms.logprobs.detach() - terms.old_logprobs
    outside = torch.where(
        terms.advantage > 0, (moved > 0) & (divergence > high), (moved < 0) & (divergence > low)
    ).detach()
    weight = terms.ratio.detach().clamp(max=settings.max_ratio)
    return torch.where(outside, 0.0, weight * terms.advantage * terms.logprobs), {"clip_fraction": outside}


POLICY_LOSSES: dict[str, Callable[[TokenTerms, LossSettings], Objective]] = {
    loss.__name__: loss for loss in (ppo, cispo, sapo, gmpo, reinforce, clip_cov, kl_cov, dppo_tv, dppo_kl)
}


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    settings: LossSettings,
    selected: Tensor | None = None,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Compute a policy loss from tensors [B, T], which are those of `TokenTerms`; gradients flow into `logprobs` only.

    Returns:
        The loss at each token, [B, T], zero where `mask` is zero; each token's own ratio, [B, T], whatever
        `settings.ratio` is, zero where `mask` is zero; and *sums over tokens*, detached scalars, which are added over
        micro batches and divided by the global token count as the loss is: `ratio`; `approx_kl`, the k3 estimate
        (`kl.py`) of KL(old policy || policy); `clip_fraction`, tokens whose gradient the clip removed or (cispo) whose
        weight it changed; and what else the loss counts.

    Raises:
        ValueError: the shapes of `advantages` and `logprobs` differ.
    """
    if advantages.shape != logprobs.shape:
        raise ValueError(f"expected advantages {tuple(logprobs.shape)}, one per token, got {tuple(advantages.shape)}")
    in_loss = mask.bool()
    log_ratio = log_ratios(logprobs, old_logprobs, mask, settings.ratio)
    terms = TokenTerms(
        torch.where(in_loss, logprobs, 0.0),
        torch.where(in_loss, old_logprobs.detach(), 0.0),
        log_ratio,
        torch.where(in_loss, advantages.detach(), 0.0),
        mask,
        selected,
    )
    objective, counts = POLICY_LOSSES[settings.kind](terms, settings)
    plain = log_ratio if settings.ratio == "token" else log_ratios(logprobs, old_logprobs, mask, "token")
    with torch.no_grad():
        sums = {"ratio": (terms.ratio * mask).sum(), "approx_kl": k3(plain).sum()}
        sums |= {name: (counted & in_loss).sum() for name, counted in counts.items()}
    return -objective * mask, plain.exp() * mask, sums


@dataclass(frozen=True, eq=False)
class TokenScores:
    """The policy's outputs for a micro batch, [b, T]: log-probabilities, and entropies computed on demand."""

    logprobs: Tensor
    entropy: Callable[[], Tensor]


TokenLoss = Callable[[Any, Rows], tuple[Tensor, dict[str, Tensor]]]
"""Maps a model's outputs for `Rows` of a batch to the loss at each token [b, T], and sums to report.

The outputs of a policy are `TokenScores`, those of a critic are values [b, T].
"""


@dataclass(frozen=True)
class KlSettings:
    """Holds how the KL to the reference is added to the loss: see `kl.token_kl` and `config/sections/algorithm.py`."""

    coef: float
    estimator: str = "k3"
    clamp: float | None = None
    ratio_weighted: bool = False


@dataclass(frozen=True, eq=False)
class PolicyObjective:
    """Computes a `TokenLoss`: the policy loss, plus the KL to a reference, minus an entropy bonus.

    Tensors are those of a whole batch, [B, T]; attributes that are not described are as in `policy_loss`. If the
    log-probabilities of rows are those of the policy before the update, `fill` is first called with them, without
    gradient: it fills in `old_logprobs` and `weights`.
    """

    advantages: Tensor
    mask: Tensor
    old_logprobs: Tensor
    answer_weights: Tensor  # of each answer's losses, [B] (`losses.answer_weights`)
    loss: LossSettings
    selected: Tensor | None = None
    weights: Tensor | None = None  # of each token's policy loss (`correction.py`, `high_entropy`)
    ref_logprobs: Tensor | None = None  # of the reference policy, if the KL to it is in the loss
    kl: KlSettings | None = None
    entropy_coef: float = 0.0
    fill: Callable[[Tensor, Rows], None] | None = None

    def __call__(self, scored: TokenScores, rows: Rows) -> tuple[Tensor, dict[str, Tensor]]:
        mask = self.mask[rows]
        if self.fill is not None:
            self.fill(scored.logprobs.detach(), rows)
        losses, ratio, sums = policy_loss(
            scored.logprobs,
            self.old_logprobs[rows],
            self.advantages[rows],
            mask,
            self.loss,
            None if self.selected is None else self.selected[rows],
        )
        if self.weights is not None:
            losses = losses * self.weights[rows]
        if self.ref_logprobs is not None and self.kl is not None:
            kl = token_kl(self.kl.estimator, scored.logprobs, self.ref_logprobs[rows], mask, self.kl.clamp)
            losses = losses + self.kl.coef * (kl * ratio if self.kl.ratio_weighted else kl)
            sums["kl"] = kl.detach().sum()
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.entropy_coef > 0):
            entropy = torch.where(mask.bool(), scored.entropy(), 0.0)
        sums["entropy"] = entropy.detach().sum()
        losses = losses - self.entropy_coef * entropy
        return losses * self.answer_weights[rows][:, None], sums


@dataclass(frozen=True, eq=False)
class ValueObjective:
    """Computes a critic's `TokenLoss`; tensors are those of a whole batch, [B, T], as in `losses.value_loss`."""

    old_values: Tensor
    returns: Tensor
    mask: Tensor
    clip: float | None

    def __call__(self, values: Tensor, rows: Rows) -> tuple[Tensor, dict[str, Tensor]]:
        return value_loss(values, self.old_values[rows], self.returns[rows], self.mask[rows], self.clip)


def sft_loss(scored: TokenScores, rows: Rows) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the negative log-likelihood of each token."""
    return -scored.logprobs, {}
