"""GRPO advantages against the standard library's statistics."""

import statistics

import pytest
import torch

from hybrid3d.rl.advantages import grpo_advantages


def test_against_numbers_worked_by_hand() -> None:
    """Rewards 1, 0, 0, 1: mean 1/2, sample variance (4 x 1/4) / 3 = 1/3, so +-(1/2) / sqrt(1/3) = +-0.8660254."""
    advantages = grpo_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0]), group=4, eps=0.0)
    torch.testing.assert_close(advantages, torch.tensor([1.0, -1.0, -1.0, 1.0]) * 0.8660254, atol=1e-6, rtol=0)


def test_against_the_statistics_module() -> None:
    rewards = [0.1, 0.7, -2.0, 5.0, 5.5, 5.25, 0.0, 0.0, 1.0]
    expected = []
    for start in (0, 3, 6):
        group = rewards[start : start + 3]
        mean, std = statistics.mean(group), statistics.stdev(group)
        expected += [(reward - mean) / (std + 1e-6) for reward in group]
    actual = grpo_advantages(torch.tensor(rewards), group=3)
    assert actual.tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, -1e6, 3e-8])
def test_equal_rewards_give_exactly_zero(reward: float) -> None:
    """In float32 the mean of seven times 0.1 is not 0.1: without care, this is noise over eps."""
    rewards = torch.tensor([reward] * 7 + [0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    advantages = grpo_advantages(rewards, group=7)
    assert advantages[:7].tolist() == [0.0] * 7
    assert advantages[8] > 2


def test_groups_do_not_see_each_other() -> None:
    alone = grpo_advantages(torch.tensor([0.0, 1.0]), group=2)
    beside = grpo_advantages(torch.tensor([0.0, 1.0, 50.0, -50.0]), group=2)
    assert alone.tolist() == beside[:2].tolist()


def test_integer_rewards() -> None:
    assert grpo_advantages(torch.tensor([1, 0]), group=2).tolist() == pytest.approx([2**-0.5, -(2**-0.5)], abs=1e-5)


def test_wrong_shapes() -> None:
    with pytest.raises(ValueError, match=r"a multiple of group=4, got shape \(6,\)"):
        grpo_advantages(torch.zeros(6), group=4)
    with pytest.raises(ValueError, match=r"got shape \(2, 4\)"):
        grpo_advantages(torch.zeros(2, 4), group=4)
    with pytest.raises(ValueError, match="a group of 1 has nothing to compare"):
        grpo_advantages(torch.zeros(6), group=1)
