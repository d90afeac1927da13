"""Losses of preference pairs, a chosen and a rejected answer to one prompt: DPO and its kin.

A pair's loss depends on the log-probabilities of its two answers, each a sum over the answer's tokens. Its gradient in
a token's log-probability is therefore a number of the token's answer, which is known as soon as both sums are. So the
sums are computed first, without gradients; an update then weights each token by that number, and the sequences of a
pair may be in different micro batches, packed or not. This is exact for an update, before which nothing has changed.
Names and formulas are those of TRL (`loss_type` of its DPO and CPO trainers), which `tests/numbers/trl_dpo.json` has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from hybrid3d.rl.batch import Batch, Rows
from hybrid3d.rl.objective import TokenScores


@dataclass(frozen=True)
class PreferenceSettings:
    """Holds the settings of a pair's loss: see `Preference` in `config/sections/algorithm.py`."""

    loss_type: str = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0
    simpo_gamma: float = 0.5
    sft_coef: float = 0.0


@dataclass(frozen=True, eq=False)
class Pairs:
    """N pairs: of each answer, [N], log policy - log reference, summed over its tokens, and how many these are.

    Without a reference it is log policy.
    """

    chosen: Tensor
    rejected: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor

    @property
    def chosen_mean(self) -> Tensor:
        return self.chosen / self.chosen_tokens

    @property
    def rejected_mean(self) -> Tensor:
        return self.rejected / self.rejected_tokens


def _smoothed(logits: Tensor, smoothing: float) -> Tensor:
    """Return the cross entropy of labels of which this fraction is flipped."""
    return -(1 - smoothing) * logsigmoid(logits) - smoothing * logsigmoid(-logits)


def _sigmoid(pairs: Pairs, settings: PreferenceSettings) -> Tensor:
    """DPO, arXiv 2305.18290, equation 7; with label smoothing, conservative DPO (https://ericmitchell.ai/cdpo.pdf)."""
    return _smoothed(settings.beta * (pairs.chosen - pairs.rejected), settings.label_smoothing)


def _sigmoid_norm(pairs: Pairs, settings: PreferenceSettings) -> Tensor:
    """Length-normalized DPO, as in Tulu 3, arXiv 2411.15124."""
    return _smoothed(settings.beta * (pairs.chosen_mean - pairs.rejected_mean), settings.label_smoothing)


def _robust(pairs: Pairs, settings: PreferenceSettings) -> Tensor:
    """Robust DPO, arXiv 2403.00409: unbiased if the fraction `label_smoothing` of the labels is flipped."""
    logits, flipped = settings.beta * (pairs.chosen - pairs.rejected), settings.label_smoothing
    return (-(1 - flipped) * logsigmoid(logits) + flipped * logsigmoid(-logits)) / (1 - 2 * flipped)


def _hinge(pairs: Pairs, settings: PreferenceSettings) -> Tensor:
    """The hinge loss of SLiC, arXiv 2305.10425, on DPO's margin, as in RSO, arXiv 2309.06657."""
    return torch.relu(1 - settings.beta * (pairs.chosen - pairs.rejected))


def _ipo(pairs: Pairs, settings: PreferenceSettings) -> Tensor:
    """IPO, arXiv 2310.12036, equation 17, with means over tokens as its authors do; beta is the paper's tau."""
    return (pairs.chosen_mean - pairs.rejected_mean - 1 / (2 * settings.beta)).square()


def _apo_zero(pairs: Pairs, settings: PreferenceSettings) -> Tensor:
    """APO-zero, arXiv 2408.06266, equation 7: for chosen answers that are better than the policy's."""
    chosen, rejected = settings.beta * pairs.chosen, settings.beta * pairs.rejected
    return 1 - torch.sigmoid(chosen) + torch.sigmoid(rejected)


def _apo_down(pairs: Pairs, settings: PreferenceSettings) -> Tensor:
    """APO-down, arXiv 2408.06266, equation 8: for chosen answers that are worse than the policy's."""
    chosen, rejected = settings.beta * pairs.chosen, settings.beta * pairs.rejected
    return torch.sigmoid(chosen) + 1 - torch.sigmoid(chosen - rejected)


def _simpo(pairs: Pairs, settings: PreferenceSettings) -> Tensor:
    """SimPO, arXiv 2405.14734, equation 6; `simpo_gamma` is the paper's gamma, the target margin of rewards."""
    margin = settings.beta * (pairs.chosen_mean - pairs.rejected_mean) - settings.simpo_gamma
    return _smoothed(margin, settings.label_smoothing)


PREFERENCE_LOSSES: dict[str, Callable[[Pairs, PreferenceSettings], Tensor]] = {
    "sigmoid": _sigmoid,
    "sigmoid_norm": _sigmoid_norm,
    "robust": _robust,
    "hinge": _hinge,
    "ipo": _ipo,
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
    "simpo": _simpo,
}
REFERENCE_FREE = ("simpo",)


@dataclass(frozen=True, eq=False)
class PairScores:
    """What is known of N pairs before an update.

    The metrics are `loss`, without the likelihood that `sft_coef` adds; `chosen_reward` and `rejected_reward`, beta
    times the log-ratio that the loss reads; `margin`, their difference; `accuracy`, 1 if it is above 0;
    `chosen_logprob` and `rejected_logprob` of the policy, summed over the answer's tokens.
    """

    slopes: Tensor  # [2 N], the derivative of a pair's loss in the log-probability of each of its sequences
    values: dict[str, Tensor]  # [N] of each metric

    def sums(self, count: int | None = None) -> dict[str, float]:
        """Return the sum of each metric over the first `count` pairs, by default all."""
        return {name: float(values[:count].sum()) for name, values in self.values.items()}


def score_pairs(batch: Batch, logprobs: Tensor, reference: Tensor | None, settings: PreferenceSettings) -> PairScores:
    """Compute the losses of pairs and their derivatives, without a reference if it is None.

    The batch has 2 N sequences: a pair's chosen answer, then its rejected one. Log-probabilities are [2 N, T].
    """
    mask = batch.response_mask.bool().to(logprobs.device)

    def summed(values: Tensor) -> Tensor:
        return torch.where(mask, values, 0.0).double().sum(1)

    of_policy, tokens = summed(logprobs), mask.sum(1)
    ratios = (of_policy if reference is None else of_policy - summed(reference)).detach().requires_grad_()
    with torch.enable_grad():
        pairs = Pairs(ratios[0::2], ratios[1::2], tokens[0::2], tokens[1::2])
        losses = PREFERENCE_LOSSES[settings.loss_type](pairs, settings)
        (slopes,) = torch.autograd.grad(losses.sum(), ratios)
    means = settings.loss_type in REFERENCE_FREE
    rewards = settings.beta * (ratios / tokens if means else ratios).detach()
    margin = rewards[0::2] - rewards[1::2]
    values = {
        "loss": losses.detach(),
        "chosen_reward": rewards[0::2],
        "rejected_reward": rewards[1::2],
        "margin": margin,
        "accuracy": (margin > 0).double(),
        "chosen_logprob": of_policy[0::2],
        "rejected_logprob": of_policy[1::2],
    }
    return PairScores(slopes, values)


@dataclass(frozen=True, eq=False)
class PairObjective:
    """Computes a `TokenLoss` with the gradient of the pairs' mean loss; its value is not that of the loss."""

    weights: Tensor  # [2 N], of each sequence's token log-probabilities: see `token_weights`

    def __call__(self, scored: TokenScores, rows: Rows) -> tuple[Tensor, dict[str, Tensor]]:
        return scored.logprobs * self.weights[rows][:, None], {}


def token_weights(slopes: Tensor, settings: PreferenceSettings, pairs: int, chosen_tokens: int, tokens: int) -> Tensor:
    """Return the weights [2 N] with which a mean over tokens has the gradient of the mean loss over pairs.

    `pairs`, `chosen_tokens` and `tokens` count pairs, tokens of chosen answers, and of all answers, over all ranks.
    """
    weights = slopes / pairs
    weights[0::2] -= settings.sft_coef / chosen_tokens
    return (weights * tokens).float()
