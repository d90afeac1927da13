"""How much better an answer, or what was left of it at a token, was than expected."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

# --- one number an answer, from the rewards of one prompt's answers -------------------------------------------------


def grpo_advantages(rewards: Tensor, group: int, penalties: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """Rewards normalised within each prompt's group: `(r - mean) / (std + eps)`.

    DeepSeekMath (arXiv 2402.03300, section 4.1.2), outcome supervision. The paper does not say which `std`: this is the
    sample standard deviation (divided by `group - 1`), because the rewards are draws from the policy and because TRL
    and verl take it too, so that curves compare. A group whose rewards are all equal teaches nothing: its advantages
    are exactly zero, where a rounded mean would leave noise that the small `std` then magnifies.

    Args:
        rewards: [B], the samples of a prompt next to each other, B = prompts x group.
        group: samples per prompt, 2 or more.
        penalties: [B], for the KL to the reference. Centred, they are taken off at last: divided by the deviation,
            those of a group whose rewards are equal would be all that counts, however small.

    Returns:
        Advantages, [B].
    """
    grouped = _grouped(rewards, group)
    centred = grouped - grouped.mean(dim=1, keepdim=True)
    normalised = _zero_where_equal(centred / (grouped.std(dim=1, keepdim=True, correction=1) + eps), grouped)
    return normalised if penalties is None else normalised - centred_advantages(penalties, group)


def centred_advantages(rewards: Tensor, group: int, penalties: Tensor | None = None) -> Tensor:
    """`r - mean` within each group: Dr. GRPO (arXiv 2503.20783, section 3.2), which leaves the deviation out.

    Arguments and result as in `grpo_advantages`.
    """
    grouped = _grouped(rewards if penalties is None else rewards - penalties, group)
    return _zero_where_equal(grouped - grouped.mean(dim=1, keepdim=True), grouped)


def leave_one_out_advantages(rewards: Tensor, group: int, penalties: Tensor | None = None) -> Tensor:
    """`r - mean of the others`: RLOO (arXiv 2402.14740). Arguments and result as in `grpo_advantages`."""
    return centred_advantages(rewards, group, penalties) * (group / (group - 1))


def plain_advantages(rewards: Tensor, group: int, penalties: Tensor | None = None) -> Tensor:
    """The rewards themselves, whatever the group: what is expected is taken off elsewhere."""
    return rewards.float() if penalties is None else rewards.float() - penalties


def _grouped(rewards: Tensor, group: int) -> Tensor:
    if group < 2:
        raise ValueError(f"a group of {group} has nothing to compare: it needs 2 or more samples of a prompt")
    if rewards.ndim != 1 or rewards.numel() % group:
        raise ValueError(f"expected rewards [B] with B a multiple of group={group}, got shape {tuple(rewards.shape)}")
    return rewards.float().reshape(-1, group)


def _zero_where_equal(values: Tensor, grouped: Tensor) -> Tensor:
    equal = (grouped == grouped[:, :1]).all(dim=1, keepdim=True)
    return torch.where(equal, 0.0, values).flatten()


# --- one number a token ---------------------------------------------------------------------------------------------


def token_rewards(scores: Tensor, penalties: Tensor, mask: Tensor) -> Tensor:
    """An answer's score at its last token, less what each token costs (its KL): InstructGPT, arXiv 2203.02155, eq. 2.

    Args:
        scores: [B]. penalties: [B, T]. mask: [B, T], 1 at the tokens of the answers.

    Returns:
        [B, T]; an answer without tokens loses its score.
    """
    last = mask * (mask.flip(1).cumsum(1).flip(1) == 1)
    return last * scores[:, None] - penalties * mask


def returns_to_go(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """The discounted sum of the rewards from each token of an answer on, [B, T]; zero where `mask` is zero.

    Steps are from one token of the answer to its next: what is between them (a tool's words) takes no time.
    """
    return gae(rewards, torch.zeros_like(rewards), mask, gamma, 1.0)[0]


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (arXiv 1506.02438, equation 16), backward over the tokens of each answer.

    Args:
        rewards: [B, T], for drawing a token.
        values: [B, T], what was expected before it was drawn.
        mask: [B, T], 1 at the tokens of the answers. After the last of them nothing is expected.
        gamma: discount of a step, lam: of an estimate one step longer.

    Returns:
        Advantages [B, T], and what the values should have been: advantages + values. Zero where `mask` is zero.
    """
    advantages = torch.zeros_like(rewards)
    following, expected = torch.zeros_like(rewards[:, 0]), torch.zeros_like(rewards[:, 0])
    for t in range(rewards.shape[1] - 1, -1, -1):
        here = mask[:, t].bool()
        surprise = rewards[:, t] + gamma * expected - values[:, t]
        following = torch.where(here, surprise + gamma * lam * following, following)
        expected = torch.where(here, values[:, t], expected)
        advantages[:, t] = torch.where(here, following, 0.0)
    return advantages, torch.where(mask.bool(), advantages + values, 0.0)


@dataclass(frozen=True)
class Moments:
    """Of numbers that lie on several ranks: how many, their mean, and the sum of squares around it."""

    count: float
    mean: float
    squares: float

    @classmethod
    def of(cls, values: Tensor, mask: Tensor) -> Moments:
        """Those where `mask` is not zero; float64, so that a layout changes the last digits only."""
        chosen = values[mask.bool()].double()
        if not chosen.numel():
            return cls(0.0, 0.0, 0.0)
        mean = chosen.mean()
        return cls(float(chosen.numel()), float(mean), float((chosen - mean).square().sum()))

    @classmethod
    def over(cls, parts: Iterable[Moments]) -> Moments:
        """Of all together (Chan, Golub and LeVeque 1979, equation 2.1)."""
        count, mean, squares = 0.0, 0.0, 0.0
        for part in parts:
            if part.count:
                both, gap = count + part.count, part.mean - mean
                squares += part.squares + gap * gap * count * part.count / both
                mean += gap * part.count / both
                count = both
        return cls(count, mean, squares)

    def normalise(self, values: Tensor, mask: Tensor, eps: float = 1e-8) -> Tensor:
        """`(x - mean) / sqrt(variance + eps)`, and zero where `mask` is zero; the sample variance, of 2 or more."""
        variance = self.squares / max(self.count - 1, 1)
        return torch.where(mask.bool(), (values - self.mean) * (variance + eps) ** -0.5, 0.0)
