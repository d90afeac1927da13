"""What a model is updated by: a loss at each token of a micro batch, from what the model says of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybrid3d.rl.batch import Rows
from hybrid3d.rl.kl import token_kl
from hybrid3d.rl.losses import Ratio, policy_loss, value_loss


@dataclass(frozen=True, eq=False)
class TokenScores:
    """What the policy says of a micro batch's tokens, [b, T]: log-probabilities and, when asked, entropies."""

    logprobs: Tensor
    entropy: Callable[[], Tensor]


TokenLoss = Callable[[Any, Rows], tuple[Tensor, dict[str, Tensor]]]
"""From what a model says of `Rows` of a batch: the loss at each token [b, T], and sums to report.

A policy says `Scored`, a critic values [b, T].
"""


@dataclass(frozen=True, eq=False)
class PolicyObjective:
    """The clipped policy loss, plus the KL to a reference, less an entropy bonus. Tensors are of a whole batch, [B, T].

    Attributes:
        weights: what each answer's losses are multiplied by, [B] (`losses.answer_weights`).
        correction: what each token's policy loss is multiplied by (`correction.py`), if anything.
        reference: log-probabilities of the reference policy, where the KL to it is in the loss.
        The others: as in `losses.policy_loss`.
    """

    advantages: Tensor
    mask: Tensor
    old: Tensor
    weights: Tensor
    clip: float
    clip_high: float
    dual_clip: float | None = None
    correction: Tensor | None = None
    ratio: Ratio = "token"
    reference: Tensor | None = None
    kl_estimator: str = "k3"
    kl_coef: float = 0.0
    entropy_coef: float = 0.0

    def __call__(self, scored: TokenScores, rows: Rows) -> tuple[Tensor, dict[str, Tensor]]:
        """A `TokenLoss` of a policy."""
        mask = self.mask[rows]
        losses, sums = policy_loss(
            scored.logprobs,
            self.old[rows],
            self.advantages[rows],
            mask,
            self.clip,
            self.clip_high,
            self.dual_clip,
            self.ratio,
        )
        if self.correction is not None:
            losses = losses * self.correction[rows]
        if self.reference is not None:
            kl = token_kl(self.kl_estimator, scored.logprobs, self.reference[rows], mask)
            losses = losses + self.kl_coef * kl
            sums["kl"] = kl.detach().sum()
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.entropy_coef > 0):
            entropy = torch.where(mask.bool(), scored.entropy(), 0.0)
        sums["entropy"] = entropy.detach().sum()
        losses = losses - self.entropy_coef * entropy
        return losses * self.weights[rows][:, None], sums


@dataclass(frozen=True, eq=False)
class ValueObjective:
    """The critic's loss; tensors are of a whole batch, [B, T], as in `losses.value_loss`."""

    old: Tensor
    returns: Tensor
    mask: Tensor
    clip: float | None

    def __call__(self, values: Tensor, rows: Rows) -> tuple[Tensor, dict[str, Tensor]]:
        """A `TokenLoss` of a critic."""
        return value_loss(values, self.old[rows], self.returns[rows], self.mask[rows], self.clip)


def sft_loss(scored: TokenScores, rows: Rows) -> tuple[Tensor, dict[str, Tensor]]:
    """Negative log-likelihood of each token."""
    return -scored.logprobs, {}
