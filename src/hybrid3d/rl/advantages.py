"""Computes advantages: per answer, from the rewards of a prompt's answers, or per token, by GAE."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

# --- per answer, from the rewards of the prompt's group --------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Answers:
    """Holds what advantages of answers are computed from, [B]; B = prompts x group, a prompt's answers are adjacent.

    Attributes:
        rewards: of the answers.
        group: samples per prompt.
        penalties: for the KL to the reference; zero where there is none.
        lengths: numbers of tokens that the policy generated.
        baselines: rewards of the greedy answers to the same prompts.
        coef: factor of the rewards, but not of the penalties, in the advantages.
    """

    rewards: Tensor
    group: int
    penalties: Tensor | None = None
    lengths: Tensor | None = None
    baselines: Tensor | None = None
    coef: float = 1.0


def group_mean(values: Tensor, answers: Answers) -> Tensor:
    """Return `r - mean` within each group (DeepSeekMath, arXiv 2402.03300, section 4.1.2)."""
    grouped = _grouped(values, answers.group)
    return _zero_where_equal(grouped - grouped.mean(dim=1, keepdim=True), grouped)


def leave_one_out(values: Tensor, answers: Answers) -> Tensor:
    """Return `r - mean of the group's other rewards`: RLOO (arXiv 2402.14740)."""
    return group_mean(values, answers) * (answers.group / (answers.group - 1))


def length_weighted_mean(values: Tensor, answers: Answers) -> Tensor:
    """Return `r - sum(length r) / sum(length)` within each group: OPO (arXiv 2505.23585, equation 7)."""
    assert answers.lengths is not None, "a mean weighted by length needs lengths"
    grouped, lengths = _grouped(values, answers.group), _grouped(answers.lengths, answers.group)
    baseline = (lengths * grouped).sum(dim=1, keepdim=True) / lengths.sum(dim=1, keepdim=True).clamp(min=1)
    return _zero_where_equal(grouped - baseline, grouped)


def best_of_group(values: Tensor, answers: Answers) -> Tensor:
    """Return for the best answer of each group its lead over the second, else 0 (arXiv 2503.19595, section 3)."""
    grouped = _grouped(values, answers.group)
    (best, second), (first, _) = (part.unbind(dim=1) for part in grouped.topk(2, dim=1))
    return torch.zeros_like(grouped).scatter(1, first[:, None], (best - second)[:, None]).flatten()


def greedy_answer(values: Tensor, answers: Answers) -> Tensor:
    """Return `r - reward of the greedy answer`: ReMax (arXiv 2310.10505, equation 5)."""
    assert answers.baselines is not None, "this advantage needs the rewards of greedy answers"
    return values.double() - answers.baselines.double()


def plain(values: Tensor, answers: Answers) -> Tensor:
    """Return the rewards, without a baseline: a critic or normalization supplies one later."""
    return values.double()


ADVANTAGES: dict[str, Callable[[Tensor, Answers], Tensor]] = {
    **{f.__name__: f for f in (group_mean, leave_one_out, length_weighted_mean, best_of_group, greedy_answer)},
    "returns": plain,
    "gae": plain,
}


def answer_advantages(advantage: str, scale: str, answers: Answers, eps: float = 1e-6) -> Tensor:
    """Return the advantage of each answer, [B], of the rewards' dtype; computed in float64.

    A mean in float32 loses what large rewards differ by: 2e-3 at rewards of 10,000.

    With `group_std`, it is divided by the sample standard deviation of the group's rewards (divided by `group - 1`, as
    in TRL and verl) plus `eps`; with `batch_std`, by that of all rewards (arXiv 2508.08221, section 4.1); with
    `varying_groups`, by the fraction of groups whose rewards vary (GPG, arXiv 2504.02546, equation 7). The advantages
    of a group whose rewards are all equal are exactly zero with a baseline of the group: the rounding error of the mean
    would otherwise be divided by a standard deviation close to zero.

    Penalties have the same baseline as rewards (`best_of_group`: the group's mean) and are not divided: within a group
    of equal rewards, dividing them by the standard deviation would scale them up however small they are.

    `advantage` is a key of `ADVANTAGES`; any other `scale` than these three leaves the advantages as they are.

    Raises:
        ValueError: answers are compared but `group` is less than 2, or B is not a multiple of it.
    """
    found = ADVANTAGES[advantage](answers.rewards, answers)
    if scale == "group_std":
        deviations = _grouped(answers.rewards, answers.group).std(dim=1, correction=1)
        found = _divided(found, deviations.repeat_interleave(answers.group) + eps)
    elif scale == "batch_std":
        found = _divided(found, answers.rewards.double().std(correction=1) + eps)
    elif scale == "varying_groups":
        grouped = _grouped(answers.rewards, answers.group)
        varying = (grouped != grouped[:, :1]).any(dim=1).double().mean()
        found = found / varying.clamp(min=1 / len(grouped))
    found = found * answers.coef
    if answers.penalties is not None:
        baseline = {"best_of_group": group_mean, "greedy_answer": plain}.get(advantage, ADVANTAGES[advantage])
        found = found - baseline(answers.penalties, answers)
    return found.to(answers.rewards.dtype if answers.rewards.is_floating_point() else torch.float32)


def whitened(rewards: Tensor, eps: float = 1e-8) -> Tensor:
    """Return rewards [B] with mean 0 and standard deviation 1, or 0 if all are equal."""
    everywhere = torch.ones_like(rewards)
    return Moments.from_values(rewards, everywhere).normalise(rewards, everywhere, eps)


def _grouped(values: Tensor, group: int) -> Tensor:
    if group < 2:
        raise ValueError(f"a group of {group} samples has no baseline: 2 or more samples of a prompt are needed")
    if values.ndim != 1 or values.numel() % group:
        raise ValueError(f"expected values [B] with B a multiple of group={group}, got shape {tuple(values.shape)}")
    return values.double().reshape(-1, group)


def _divided(values: Tensor, deviations: Tensor) -> Tensor:
    return torch.where(values == 0, 0.0, values / deviations)


def _zero_where_equal(values: Tensor, grouped: Tensor) -> Tensor:
    equal = (grouped == grouped[:, :1]).all(dim=1, keepdim=True)
    return torch.where(equal, 0.0, values).flatten()


# --- per token ------------------------------------------------------------------------------------------------------


def token_rewards(scores: Tensor, penalties: Tensor, mask: Tensor) -> Tensor:
    """Put each answer's score at its last token, less each token's KL penalty (InstructGPT, arXiv 2203.02155, eq. 2).

    Scores are [B]; penalties, the mask (1 at the tokens of the answers) and the result are [B, T]. The score of an
    answer without tokens is dropped.
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
    """Return advantages and returns (advantages + values), [B, T], by GAE (arXiv 1506.02438, equation 16).

    It goes backward over each answer's tokens. Both are zero where `mask` is zero.

    Args:
        rewards: [B, T], the reward for sampling each token.
        values: [B, T], the critic's value of the state before each token.
        mask: [B, T], 1 at the tokens of the answers. The value after the last of them is zero.
        gamma: discount per step.
        lam: weight of the estimate that looks one step further.
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
        normal = (values.double() - self.mean) * (variance + eps) ** -0.5
        return torch.where(mask.bool(), normal, 0.0).to(values.dtype)
