"""How much better a sample was than expected."""

from __future__ import annotations

from torch import Tensor, where


def grpo_advantages(rewards: Tensor, group: int, eps: float = 1e-6) -> Tensor:
    """Rewards normalised within each prompt's group: `(r - mean) / (std + eps)`.

    DeepSeekMath (arXiv 2402.03300, section 4.1.2), outcome supervision. The paper does not say which `std`: this is the
    sample standard deviation (divided by `group - 1`), because the rewards are draws from the policy and because TRL
    and verl take it too, so that curves compare. A group whose rewards are all equal teaches nothing: its advantages
    are exactly zero, where a rounded mean would leave noise that the small `std` then magnifies.

    Args:
        rewards: [B], the samples of a prompt next to each other, B = prompts x group.
        group: samples per prompt, 2 or more.

    Returns:
        Advantages, [B].
    """
    if group < 2:
        raise ValueError(f"a group of {group} has nothing to compare: GRPO needs 2 or more samples of a prompt")
    if rewards.ndim != 1 or rewards.numel() % group:
        raise ValueError(f"expected rewards [B] with B a multiple of group={group}, got shape {tuple(rewards.shape)}")
    grouped = rewards.float().reshape(-1, group)
    centred = grouped - grouped.mean(dim=1, keepdim=True)
    normalised = centred / (grouped.std(dim=1, keepdim=True, correction=1) + eps)
    equal = (grouped == grouped[:, :1]).all(dim=1, keepdim=True)
    return where(equal, 0.0, normalised).flatten()
