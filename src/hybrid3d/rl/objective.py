"""Defines the objectives of updates: each returns the loss at each token of a micro batch, given a model's outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybrid3d.rl.batch import Rows
from hybrid3d.rl.kl import token_kl
from hybrid3d.rl.losses import value_loss
from hybrid3d.rl.policy_losses import LossSettings, policy_loss


@dataclass(frozen=True, eq=False)
class TokenScores:
    """Holds the policy's outputs for a micro batch, [b, T]: log-probabilities, and entropies computed on demand."""

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
    """Computes the policy loss, plus the KL to a reference, minus an entropy bonus.

    Tensors are those of a whole batch, [B, T]; attributes that are not described are as in `policy_losses.policy_loss`.

    Attributes:
        answer_weights: weight of each answer's losses, [B] (`losses.answer_weights`).
        weights: weight of each token's policy loss (`correction.py`, `high_entropy`), or None.
        fill: is first called with the log-probabilities of rows, without gradient, if they are those of the policy
            before the update: it fills in `old_logprobs` and `weights`.
        ref_logprobs: log-probabilities of the reference policy if the KL to it is in the loss, else None.
    """

    advantages: Tensor
    mask: Tensor
    old_logprobs: Tensor
    answer_weights: Tensor
    loss: LossSettings
    selected: Tensor | None = None
    weights: Tensor | None = None
    ref_logprobs: Tensor | None = None
    kl: KlSettings | None = None
    entropy_coef: float = 0.0
    fill: Callable[[Tensor, Rows], None] | None = None

    def __call__(self, scored: TokenScores, rows: Rows) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute a policy's `TokenLoss`."""
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
    """Computes the critic's loss; tensors are those of a whole batch, [B, T], as in `losses.value_loss`."""

    old_values: Tensor
    returns: Tensor
    mask: Tensor
    clip: float | None

    def __call__(self, values: Tensor, rows: Rows) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute a critic's `TokenLoss`."""
        return value_loss(values, self.old_values[rows], self.returns[rows], self.mask[rows], self.clip)


def sft_loss(scored: TokenScores, rows: Rows) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the negative log-likelihood of each token."""
    return -scored.logprobs, {}
