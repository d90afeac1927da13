"""Advantages against the standard library's statistics, and worked by hand."""

import statistics

import pytest
import torch

from hybrid3d.rl.advantages import Answers, Moments, answer_advantages, gae, returns_to_go, token_rewards, whitened


def grpo(rewards: torch.Tensor, group: int, penalties: torch.Tensor | None = None, eps: float = 1e-6) -> torch.Tensor:
    return answer_advantages("group_mean", "group_std", Answers(rewards, group, penalties), eps)


def unscaled(advantage: str, rewards: list[float], group: int, penalties: list[float] | None = None) -> list[float]:
    held = None if penalties is None else torch.tensor(penalties)
    return answer_advantages(advantage, "none", Answers(torch.tensor(rewards), group, held)).tolist()


def test_against_numbers_worked_by_hand() -> None:
    """Rewards 1, 0, 0, 1: mean 1/2, sample variance (4 x 1/4) / 3 = 1/3, so +-(1/2) / sqrt(1/3) = +-0.8660254."""
    advantages = grpo(torch.tensor([1.0, 0.0, 0.0, 1.0]), group=4, eps=0.0)
    torch.testing.assert_close(advantages, torch.tensor([1.0, -1.0, -1.0, 1.0]) * 0.8660254, atol=1e-6, rtol=0)


def test_against_the_statistics_module() -> None:
    rewards = [0.1, 0.7, -2.0, 5.0, 5.5, 5.25, 0.0, 0.0, 1.0]
    expected = []
    for start in (0, 3, 6):
        group = rewards[start : start + 3]
        mean, std = statistics.mean(group), statistics.stdev(group)
        expected += [(reward - mean) / (std + 1e-6) for reward in group]
    actual = grpo(torch.tensor(rewards), group=3)
    assert actual.tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, -1e6, 3e-8])
def test_equal_rewards_give_exactly_zero(reward: float) -> None:
    """In float32 the mean of seven times 0.1 is not 0.1: without care, this is noise over eps."""
    rewards = torch.tensor([reward] * 7 + [0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    advantages = grpo(rewards, group=7)
    assert advantages[:7].tolist() == [0.0] * 7
    assert advantages[8] > 2


def test_groups_do_not_see_each_other() -> None:
    alone = grpo(torch.tensor([0.0, 1.0]), group=2)
    beside = grpo(torch.tensor([0.0, 1.0, 50.0, -50.0]), group=2)
    assert alone.tolist() == beside[:2].tolist()


def test_integer_rewards() -> None:
    assert grpo(torch.tensor([1, 0]), group=2).tolist() == pytest.approx([2**-0.5, -(2**-0.5)], abs=1e-5)


def test_wrong_shapes() -> None:
    with pytest.raises(ValueError, match=r"a multiple of group=4, got shape \(6,\)"):
        grpo(torch.zeros(6), group=4)
    with pytest.raises(ValueError, match=r"got shape \(2, 4\)"):
        grpo(torch.zeros(2, 4), group=4)
    with pytest.raises(ValueError, match="a group of 1 samples has no baseline"):
        grpo(torch.zeros(6), group=1)


def test_centred_and_left_out_by_hand() -> None:
    """Rewards 3, 0, 0: mean 1; the others' means are 0, 1.5, 1.5."""
    assert unscaled("group_mean", [3.0, 0.0, 0.0], 3) == [2.0, -1.0, -1.0]
    assert unscaled("leave_one_out", [3.0, 0.0, 0.0], 3) == [3.0, -1.5, -1.5]


def test_answer_baselines_match_values_worked_by_hand() -> None:
    """Lengths 1, 1, 2 weight rewards 4, 0, 2 to (4 + 0 + 4) / 4 = 2; the best leads the second by 2."""
    rewards, lengths = torch.tensor([4.0, 0.0, 2.0]), torch.tensor([1.0, 1.0, 2.0])
    answers = Answers(rewards, 3, lengths=lengths, baselines=torch.tensor([1.0, 1.0, 1.0]))
    wanted = {
        "length_weighted_mean": [2.0, -2.0, 0.0],
        "best_of_group": [2.0, 0.0, 0.0],
        "greedy_answer": [3.0, -1.0, 1.0],
    }
    for advantage, found in wanted.items():
        assert answer_advantages(advantage, "none", answers).tolist() == found


def test_scales_by_hand() -> None:
    """Of the groups 1, 0 and 1, 1 one varies; all four have the standard deviation 1/2."""
    answers = Answers(torch.tensor([1.0, 0.0, 1.0, 1.0]), 2)
    assert answer_advantages("group_mean", "varying_groups", answers).tolist() == [1.0, -1.0, 0.0, 0.0]
    found = answer_advantages("group_mean", "batch_std", answers, eps=0.0)
    assert found.tolist() == pytest.approx([1.0, -1.0, 0.0, 0.0])
    assert answer_advantages("group_mean", "varying_groups", Answers(torch.ones(4), 2)).tolist() == [0.0] * 4


def test_whitened_against_the_statistics_module() -> None:
    rewards = [0.5, 1.0, -2.0, 4.0]
    mean, std = statistics.mean(rewards), statistics.stdev(rewards)
    assert whitened(torch.tensor(rewards)).tolist() == pytest.approx([(r - mean) / std for r in rewards], abs=1e-6)
    assert whitened(torch.ones(3)).tolist() == [0.0] * 3


MASK = torch.tensor([[0.0, 1.0, 1.0, 1.0], [0.0, 1.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0]])


def test_score_comes_at_last_token_and_penalties_where_they_arise() -> None:
    penalties = torch.tensor([[9.0, 0.1, 0.2, 0.3], [9.0, 0.5, 9.0, 0.25], [9.0, 9.0, 9.0, 9.0]])
    found = token_rewards(torch.tensor([1.0, 2.0, 5.0]), penalties, MASK)
    wanted = torch.tensor([[0.0, -0.1, -0.2, 0.7], [0.0, -0.5, 0.0, 1.75], [0.0, 0.0, 0.0, 0.0]])
    torch.testing.assert_close(found, wanted)


def test_returns_by_hand() -> None:
    """With gamma 1/2: 1 + 2/2 + 4/4 = 3, 2 + 4/2 = 4, 4. What is between two tokens of an answer takes no time."""
    rewards = torch.tensor([[7.0, 1.0, 2.0, 4.0], [7.0, 1.0, 7.0, 4.0], [7.0, 7.0, 7.0, 7.0]])
    found = returns_to_go(rewards, MASK, gamma=0.5)
    assert found.tolist() == [[0.0, 3.0, 4.0, 4.0], [0.0, 3.0, 0.0, 4.0], [0.0, 0.0, 0.0, 0.0]]


def test_gae_by_hand() -> None:
    """gamma 1/2, lambda 1/2, values 1, 2, 3 and rewards 0, 0, 8.

    The surprises are 0 + 2/2 - 1 = 0, 0 + 3/2 - 2 = -1/2, 8 - 3 = 5; so the advantages are 5, -1/2 + 5/4 = 3/4, 3/16.
    """
    values = torch.tensor([[9.0, 1.0, 2.0, 3.0]])
    advantages, returns = gae(torch.tensor([[9.0, 0.0, 0.0, 8.0]]), values, MASK[:1], gamma=0.5, lam=0.5)
    assert advantages.tolist() == [[0.0, 0.1875, 0.75, 5.0]]
    assert returns.tolist() == [[0.0, 1.1875, 2.75, 8.0]]


def test_moments_over_ranks_are_those_of_all() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(7, 5, generator=generator) * 3 + 100
    mask = (torch.rand(7, 5, generator=generator) < 0.6).float()
    chosen = values[mask.bool()].tolist()
    moments = Moments.merge(
        Moments.from_values(values[rows], mask[rows]) for rows in (slice(2), slice(2, 2), slice(2, 7))
    )
    assert (moments.count, moments.mean) == (len(chosen), pytest.approx(statistics.mean(chosen), rel=1e-12))
    normalised = moments.normalise(values, mask)
    mean, std = statistics.mean(chosen), statistics.stdev(chosen)
    assert normalised[mask.bool()].tolist() == pytest.approx([(x - mean) / std for x in chosen], abs=1e-4)
    assert not normalised[~mask.bool()].any()


def test_penalties_are_not_divided_by_the_deviation_of_rewards() -> None:
    """Penalties 0, 0.002 are 0.001 apart from their mean, also in a group whose rewards are equal."""
    rewards, penalties = torch.tensor([1.0, 1.0, 0.0, 1.0]), torch.tensor([0.0, 0.002, 0.0, 0.002])
    found = grpo(rewards, 2, penalties, eps=0.0)
    torch.testing.assert_close(found, torch.tensor([0.001, -0.001, -(0.5**0.5) + 0.001, 0.5**0.5 - 0.001]))
    given = [1.0, 1.0, 0.0, 1.0], 2, [0.0, 0.002, 0.0, 0.002]
    assert unscaled("group_mean", *given) == pytest.approx([0.001, -0.001, -0.499, 0.499], abs=1e-6)
    assert unscaled("leave_one_out", *given) == pytest.approx([0.002, -0.002, -0.998, 0.998], abs=1e-6)
    assert unscaled("best_of_group", *given) == pytest.approx([0.001, -0.001, 0.001, 0.999], abs=1e-6)
