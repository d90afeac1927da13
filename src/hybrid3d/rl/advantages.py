"""Computes advantages: per answer, from the rewards of a prompt's answers, or per token, by GAE."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

# --- per answer, from the rewards of the prompt's group --------------------------------------------------------------


def grpo_advantages(rewards: Tensor, group: int, penalties: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """Normalize the rewards within each prompt's group: `(r - mean) / (std + eps)`.

    DeepSeekMath (arXiv 2402.03300, section 4.1.2), outcome supervision. The paper does not say which `std`: this is the
    sample standard deviation (divided by `group - 1`), because the rewards are samples and because TRL and verl use it
    too, so that training curves can be compared. The advantages of a group whose rewards are all equal are exactly
    zero: the rounding error of the mean would otherwise be divided by an `std` close to zero.

    Args:
        rewards: [B], where B = prompts x group and the samples of a prompt are adjacent.
        group: samples per prompt, 2 or more.
        penalties: [B], for the KL to the reference. They are centred and subtracted after the division: within a group
            of equal rewards, dividing them by the standard deviation would scale them up however small they are.

    Returns:
        Advantages, [B].

    Raises:
        ValueError: `group` is less than 2, or B is not a multiple of it.
    """
    grouped = _grouped(rewards, group)
    centred = grouped - grouped.mean(dim=1, keepdim=True)
    normalised = _zero_where_equal(centred / (grouped.std(dim=1, keepdim=True, correction=1) + eps), grouped)
    return normalised if penalties is None else normalised - centred_advantages(penalties, group)


def centred_advantages(rewards: Tensor, group: int, penalties: Tensor | None = None) -> Tensor:
    """Return `r - mean` within each group: Dr. GRPO (arXiv 2503.20783, section 3.2), without the standard deviation.

    Arguments, result and errors are those of `grpo_advantages`.
    """
    grouped = _grouped(rewards if penalties is None else rewards - penalties, group)
    return _zero_where_equal(grouped - grouped.mean(dim=1, keepdim=True), grouped)


def leave_one_out_advantages(rewards: Tensor, group: int, penalties: Tensor | None = None) -> Tensor:
    """Return `r - mean of the group's other rewards`: RLOO (arXiv 2402.14740).

    Arguments, result and errors are those of `grpo_advantages`.
    """
    return centred_advantages(rewards, group, penalties) * (group / (group - 1))


def plain_advantages(rewards: Tensor, group: int, penalties: Tensor | None = None) -> Tensor:
    """Return the rewards less the penalties, without a group baseline: a critic or normalization supplies one later."""
    return rewards.float() if penalties is None else rewards.float() - penalties


def _grouped(rewards: Tensor, group: int) -> Tensor:
    if group < 2:
        raise ValueError(f"a group of {group} samples has no baseline: 2 or more samples of a prompt are needed")
    if rewards.ndim != 1 or rewards.numel() % group:
        raise ValueError(f"expected rewards [B] with B a multiple of group={group}, got shape {tuple(rewards.shape)}")
    return rewards.float().reshape(-1, group)


def _zero_where_equal(values: Tensor, grouped: Tensor) -> Tensor:
    equal = (grouped == grouped[:, :1]).all(dim=1, keepdim=True)
    return torch.where(equal, 0.0, values).flatten()


# --- per token ------------------------------------------------------------------------------------------------------


def token_rewards(scores: Tensor, penalties: Tensor, mask: Tensor) -> Tensor:
    """Put each answer's score at its last token, less each token's KL penalty (InstructGPT, arXiv 2203.02155, eq. 2).

    Args:
        scores: [B].
        penalties: [B, T].
        mask: [B, T], 1 at the tokens of the answers.

    Returns:
        [B, T]; the score of an answer without tokens is dropped.
    """
    last = mask * (mask.flip(1).cumsum(1).flip(1) == 1)
    return last * scores[:, None] - penalties * mask


def returns_to_go(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Return the discounted sum of rewards from each answer token to the end, [B, T]; zero where `mask` is zero.

    A step leads from one token of the answer to the next one: tokens between them that `mask` excludes, such as an
    environment's reply, are not discounted for.
    """
    return gae(rewards, torch.zeros_like(rewards), mask, gamma, 1.0)[0]


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Compute generalized advantage estimation (arXiv 1506.02438, equation 16), backward over each answer's tokens.

    Args:
        rewards: [B, T], the reward for sampling each token.
        values: [B, T], the critic's value of the state before each token.
        mask: [B, T], 1 at the tokens of the answers. The value after the last of them is zero.
        gamma: discount per step.
        lam: weight of the estimate that looks one step further.

    Returns:
        Advantages and returns (advantages + values), each [B, T], zero where `mask` is zero.
    """
    advantages = torch.zeros_like(rewards)
    next_advantage, next_value = torch.zeros_like(rewards[:, 0]), torch.zeros_like(rewards[:, 0])
    for t in range(rewards.shape[1] - 1, -1, -1):
        in_answer = mask[:, t].bool()
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = torch.where(in_answer, delta + gamma * lam * next_advantage, next_advantage)
        next_value = torch.where(in_answer, values[:, t], next_value)
        advantages[:, t] = torch.where(in_answer, next_advantage, 0.0)
    return advantages, torch.where(mask.bool(), advantages + values, 0.0)


@dataclass(frozen=True)
class Moments:
    """Holds the count, the mean and the sum of squared deviations of values that are spread over ranks."""

    count: float
    mean: float
    squares: float

    @classmethod
    def from_values(cls, values: Tensor, mask: Tensor) -> Moments:
        """Compute them where `mask` is not zero, in float64, so that the layout changes only the last digits."""
        chosen = values[mask.bool()].double()
        if not chosen.numel():
            return cls(0.0, 0.0, 0.0)
        mean = chosen.mean()
        return cls(float(chosen.numel()), float(mean), float((chosen - mean).square().sum()))

    @classmethod
    def merge(cls, parts: Iterable[Moments]) -> Moments:
        """Combine the moments of disjoint parts (Chan, Golub and LeVeque 1979, equation 2.1)."""
        count, mean, squares = 0.0, 0.0, 0.0
        for part in parts:
            if part.count:
                total, gap = count + part.count, part.mean - mean
                squares += part.squares + gap * gap * count * part.count / total
                mean += gap * part.count / total
                count = total
        return cls(count, mean, squares)

    def normalise(self, values: Tensor, mask: Tensor, eps: float = 1e-8) -> Tensor:
        """Return `(x - mean) / sqrt(variance + eps)`, zero where `mask` is zero; `variance` is the sample variance."""
        variance = self.squares / max(self.count - 1, 1)
        return torch.where(mask.bool(), (values - self.mean) * (variance + eps) ** -0.5, 0.0)
