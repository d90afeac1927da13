"""Losses against plain Python, gradients against closed forms, and sums over parts against the whole."""

import itertools
import math
from collections.abc import Callable
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybrid3d.rl.losses import Aggregation, answer_weights, masked_sum, value_loss
from hybrid3d.rl.objective import (
    KlSettings,
    LossSettings,
    PolicyObjective,
    TokenScores,
    log_ratios,
    policy_loss,
    sft_loss,
)

PPO = LossSettings(clip=0.2)


def one_token(ratio: float, advantage: float) -> tuple[float, float, float]:
    """Loss, gradient of it in logprobs, and whether it counts as clipped, of a single token with this ratio."""
    logprobs = torch.tensor([[math.log(ratio) - 3.0]], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([[-3.0]], dtype=torch.float64)
    ones = torch.ones(1, 1, dtype=torch.float64)
    loss, _, stats = policy_loss(logprobs, old, advantage * ones, ones, PPO)
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    return loss.item(), gradient.item(), stats["clip_fraction"].item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [
        # d(-r A) / d(log p) = -r A inside the clip, and 0 where the clamp holds: figure 1 of arXiv 1707.06347.
        (1.0, 2.0, -2.0, -2.0, 0),
        (1.1, 2.0, -2.2, -2.2, 0),
        (1.5, 2.0, -2.4, 0.0, 1),  # A > 0 and r past 1 + clip: nothing more to gain
        (0.5, 2.0, -1.0, -1.0, 0),  # A > 0 and r low: the whole gradient, to come back
        (0.5, -2.0, 1.6, 0.0, 1),  # A < 0 and r below 1 - clip: nothing more to gain
        (1.5, -2.0, 3.0, 3.0, 0),  # A < 0 and r high: the whole gradient, to come back
        (1.5, 0.0, 0.0, 0.0, 0),
    ],
)
def test_clipped_surrogate_by_hand(ratio: float, advantage: float, loss: float, gradient: float, clipped: int) -> None:
    assert one_token(ratio, advantage) == pytest.approx((loss, gradient, clipped), abs=1e-12)


def scored(logprobs: Tensor) -> TokenScores:
    return TokenScores(logprobs, lambda: torch.zeros_like(logprobs))


def random_batch(rows: int, width: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logprobs, old_logprobs, advantages, mask in float64; ratios well past the clip on both sides."""
    generator = torch.Generator().manual_seed(seed)
    logprobs = -torch.rand(rows, width, generator=generator, dtype=torch.float64) * 3
    old = logprobs + torch.randn(rows, width, generator=generator, dtype=torch.float64) * 0.4
    advantages = torch.randn(rows, 1, generator=generator, dtype=torch.float64).expand(rows, width).clone()
    mask = (torch.rand(rows, width, generator=generator) < 0.7).double()
    mask[0, 0] = 1.0
    return logprobs, old, advantages, mask


def test_values_and_stats_against_plain_python() -> None:
    logprobs, old, advantages, mask = random_batch(5, 9, seed=1)
    loss, _, stats = policy_loss(logprobs, old, advantages, mask, PPO)
    sums = {"ratio": 0.0, "clip_fraction": 0.0, "approx_kl": 0.0}
    for b in range(5):
        advantage = advantages[b, 0].item()
        for t in range(9):
            if not mask[b, t]:
                assert loss[b, t] == 0
                continue
            ratio = math.exp(logprobs[b, t].item() - old[b, t].item())
            clipped = min(max(ratio, 0.8), 1.2)
            assert loss[b, t].item() == pytest.approx(-min(ratio * advantage, clipped * advantage), abs=1e-12)
            sums["ratio"] += ratio
            sums["clip_fraction"] += (ratio > 1.2 and advantage > 0) or (ratio < 0.8 and advantage < 0)
            sums["approx_kl"] += ratio - 1 - math.log(ratio)
    assert sums["clip_fraction"] > 3
    assert {name: value.item() for name, value in stats.items()} == pytest.approx(sums, abs=1e-12)
    assert not any(value.requires_grad for value in stats.values())


def test_gradients_flow_into_the_trained_policy_only() -> None:
    logprobs, old, advantages, mask = (tensor.requires_grad_() for tensor in random_batch(2, 3, seed=2))
    policy_loss(logprobs, old, advantages, mask.detach(), PPO)[0].sum().backward()
    assert logprobs.grad is not None
    assert old.grad is None
    assert advantages.grad is None


def test_padding_may_hold_anything() -> None:
    logprobs = torch.tensor([[-1.0, 500.0, -math.inf, math.nan]], requires_grad=True)
    old = torch.tensor([[-1.1, -500.0, 0.0, 0.0]])
    mask = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    loss, _, stats = policy_loss(logprobs, old, torch.ones(1, 4), mask, PPO)
    masked_sum(loss, mask).backward()
    assert loss[0, 1:].tolist() == [0.0, 0.0, 0.0]
    assert logprobs.grad is not None
    assert logprobs.grad[0].tolist() == pytest.approx([-math.exp(0.1), 0.0, 0.0, 0.0])
    assert stats["ratio"].item() == pytest.approx(math.exp(0.1))


def gradient_of(loss: Callable[[Tensor, slice], Tensor], parts: list[slice], logits: Tensor) -> tuple[float, Tensor]:
    """Loss and accumulated gradient over the parts, each with a graph of its own, as micro batches and ranks have."""
    weights = logits.clone().requires_grad_()
    total = 0.0
    for part in parts:
        share = loss(weights, part)
        share.backward()
        total += share.item()
    assert weights.grad is not None
    return total, weights.grad


@settings(deadline=None)
@given(
    cuts=st.lists(st.integers(0, 12), max_size=5),
    seed=st.integers(0, 1000),
    algorithm=st.sampled_from(["grpo", "sft"]),
)
def test_loss_and_gradient_of_any_split_equal_the_whole(cuts: list[int], seed: int, algorithm: str) -> None:
    """Parts of unequal size and with unequal shares of padding, empty ones too."""
    logits, old, advantages, mask = random_batch(12, 6, seed)
    tokens = int(mask.sum())

    def loss(weights: Tensor, part: slice) -> Tensor:
        logprobs = torch.nn.functional.logsigmoid(weights[part])
        if algorithm == "sft":
            return masked_sum(sft_loss(scored(logprobs), part)[0], mask[part]) / tokens
        per_token, _, _ = policy_loss(logprobs, old[part], advantages[part], mask[part], PPO)
        return masked_sum(per_token, mask[part]) / tokens

    edges = [0, *sorted(cuts), 12]
    whole = gradient_of(loss, [slice(0, 12)], logits)
    parts = gradient_of(loss, [slice(a, b) for a, b in itertools.pairwise(edges)], logits)
    assert parts[0] == pytest.approx(whole[0], rel=1e-12, abs=1e-12)
    torch.testing.assert_close(parts[1], whole[1], rtol=0, atol=1e-15)  # each row's gradient comes from one part


def test_masked_sum_by_hand() -> None:
    values = torch.tensor([[1.0, 2.0, 4.0], [8.0, math.nan, 32.0]])
    mask = torch.tensor([[0.0, 1.0, 1.0], [1.0, 0.0, 0.0]])
    assert masked_sum(values, mask).item() == 14
    assert masked_sum(values, torch.zeros(2, 3)).item() == 0.0


def test_sft_loss_is_torchs_cross_entropy() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(2, 4, 11, generator=generator)
    targets = torch.randint(0, 11, (2, 4), generator=generator)
    mask = torch.tensor([[0.0, 1.0, 1.0, 0.0], [0.0, 0.0, 1.0, 1.0]])
    logprobs = logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    ignored = targets.masked_fill(mask == 0, -100)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ignored.flatten(), ignore_index=-100)
    losses, _ = sft_loss(scored(logprobs), slice(0, 2))
    torch.testing.assert_close(masked_sum(losses, mask) / 4, expected)


def test_policy_loss_needs_one_advantage_a_token() -> None:
    logprobs, old, _, mask = random_batch(2, 3, seed=4)
    with pytest.raises(ValueError, match=r"expected advantages \(2, 3\), one per token, got \(2,\)"):
        policy_loss(logprobs, old, torch.zeros(2), mask, PPO)


def test_upper_clip_may_be_another() -> None:
    logprobs = torch.tensor([[math.log(1.25), math.log(1.35), math.log(0.7)]], dtype=torch.float64)
    advantages = torch.tensor([[1.0, 1.0, -1.0]], dtype=torch.float64)
    ones = torch.ones(1, 3, dtype=torch.float64)
    losses, _, stats = policy_loss(logprobs, 0 * logprobs, advantages, ones, LossSettings(clip=0.2, clip_high=0.3))
    assert losses[0].tolist() == pytest.approx([-1.25, -1.3, 0.8])
    assert stats["clip_fraction"] == 2


def test_second_clip_holds_where_a_ratio_ran_away() -> None:
    """A = -1: at r = 2 the loss is r, at r = 10 it is 3 and has no gradient. A = 1 at r = 10 is held by the first."""
    logprobs = torch.tensor([[2.0, 10.0, 10.0]], dtype=torch.float64).log().requires_grad_()
    advantages = torch.tensor([[-1.0, -1.0, 1.0]], dtype=torch.float64)
    losses, _, stats = policy_loss(logprobs, 0 * logprobs, advantages, torch.ones(1, 3), LossSettings(dual_clip=3.0))
    (gradient,) = torch.autograd.grad(losses.sum(), logprobs)
    assert losses[0].tolist() == pytest.approx([2.0, 3.0, -1.2])
    assert gradient[0].tolist() == pytest.approx([2.0, 0.0, 0.0])
    assert stats["dual_clip_fraction"] == 1


def test_sequence_has_one_ratio() -> None:
    """GSPO: (p1 p2 / q1 q2)^(1/2), here ln: (0.3 - 0.1) / 2 = 0.1; each token's gradient is r A / |y|, |y| times."""
    logprobs = torch.tensor([[5.0, 0.3, -0.1, 5.0]], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[0.0, 1.0, 1.0, 0.0]], dtype=torch.float64)
    found = log_ratios(logprobs, torch.zeros(1, 4), mask, "sequence")
    assert found[0].tolist() == pytest.approx([0.0, 0.1, 0.1, 0.0])
    losses, _, _ = policy_loss(logprobs, torch.zeros(1, 4), 2 * mask, mask, LossSettings(ratio="sequence"))
    (gradient,) = torch.autograd.grad(losses.sum(), logprobs)
    assert gradient[0].tolist() == pytest.approx([0.0, -2 * math.exp(0.1), -2 * math.exp(0.1), 0.0])


@pytest.mark.parametrize(
    ("aggregation", "wanted"),
    [
        ("token", (1 + 2 + 3 + 10) / 4),  # over all tokens
        ("sequence", ((1 + 2 + 3) / 3 + 10 / 1) / 2),  # of each answer's mean
        ("sequence_sum", (1 + 2 + 3 + 10) / 2),  # of each answer's sum
        ("constant", (1 + 2 + 3 + 10) / (2 * 8)),  # over the longest that both might have been
    ],
)
def test_means_by_hand(aggregation: Aggregation, wanted: float) -> None:
    losses = torch.tensor([[1.0, 2.0, 3.0], [10.0, 0.0, 0.0]])
    weights = answer_weights(aggregation, torch.tensor([3, 1]), max_tokens=8)
    assert float((losses * weights[:, None]).sum() / 4) == pytest.approx(wanted)


def test_empty_answer_weighs_nothing() -> None:
    assert answer_weights("sequence", torch.tensor([2, 0]), max_tokens=8).tolist() == [0.5, 0.0]


@pytest.mark.parametrize("aggregation", get_args(Aggregation))
def test_answer_weighs_as_much_in_several_sequences_as_in_one(aggregation: Aggregation) -> None:
    """Answer 0 has two branches, of 1 and 2 tokens, and one that fills the batch; answer 1 is not branched."""
    lengths, answers = torch.tensor([1, 2, 1, 0]), torch.tensor([0, 0, 1, 0])
    weights = answer_weights(aggregation, lengths, max_tokens=8, answers=answers)
    whole = answer_weights(aggregation, torch.tensor([3, 1]), max_tokens=8)
    assert weights.tolist() == [whole[0], whole[0], whole[1], whole[0]]


@pytest.mark.parametrize("aggregation", get_args(Aggregation))
@pytest.mark.parametrize("trained", [None, torch.tensor([True, True, True, True, True])])
def test_rows_of_no_answer_weigh_nothing(aggregation: Aggregation, trained: torch.Tensor | None) -> None:
    """A minibatch whose rows are filled up has the weights that it has without; of fillings alone it has none."""
    lengths, answers = torch.tensor([1, 0, 2, 1, 0]), torch.tensor([4, -1, 4, 7, -1])
    weights = answer_weights(aggregation, lengths, 8, answers, trained)
    wanted = answer_weights(aggregation, torch.tensor([1, 2, 1]), 8, torch.tensor([4, 4, 7]))
    assert weights[[0, 2, 3]].tolist() == wanted.tolist()
    assert weights[[1, 4]].tolist() == [0.0, 0.0]
    assert answer_weights(aggregation, torch.tensor([0, 0]), 8, torch.tensor([-1, -1])).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("aggregation", get_args(Aggregation))
def test_untrained_answers_are_not_part_of_the_mean(aggregation: Aggregation) -> None:
    """The sum over the tokens of all sequences, divided by their number, is the mean over those that are trained on."""
    lengths, losses = torch.tensor([3, 1, 2]), torch.tensor([6.0, 50.0, 10.0])  # sums over tokens
    weights = answer_weights(aggregation, lengths, 8, torch.tensor([0, 1, 2]), torch.tensor([True, False, True]))
    wanted = {"token": 16 / 5, "sequence": (6 / 3 + 10 / 2) / 2, "sequence_sum": 16 / 2, "constant": 16 / (2 * 8)}
    assert float((weights * losses).sum() / lengths.sum()) == pytest.approx(wanted[aggregation])
    assert answer_weights(aggregation, lengths, 8, trained=torch.zeros(3, dtype=torch.bool)).tolist() == [0.0] * 3


def test_value_loss_by_hand() -> None:
    """Old 0, clip 1/2: from value 2 to return 1, 1/2 (1)^2; bounded to 1/2 it is closer: 1/8. To return -1: 9/2 counts.

    From value 2 to return 3: 1/2; bounded to 1/2: 25/8, which counts, and has no gradient.
    """
    values = torch.tensor([[2.0, 2.0, 2.0, math.nan]], requires_grad=True)
    returns, mask = torch.tensor([[1.0, -1.0, 3.0, 0.0]]), torch.tensor([[1.0, 1.0, 1.0, 0.0]])
    losses, stats = value_loss(values, torch.zeros(1, 4), returns, mask, clip=0.5)
    (gradient,) = torch.autograd.grad(losses.sum(), values)
    assert losses[0].tolist() == [0.5, 4.5, 3.125, 0.0]
    assert gradient[0].tolist() == [1.0, 3.0, 0.0, 0.0]
    assert {name: value.item() for name, value in stats.items()} == {
        "value_clip_fraction": 1,
        "value": 6,
        "value_error": 11,
    }
    assert value_loss(values, torch.zeros(1, 4), returns, mask, clip=None)[0][0].tolist() == [0.5, 4.5, 0.5, 0.0]


def test_objective_by_hand() -> None:
    """(policy loss x correction + coef x KL - coef x entropy) x the answer's weight, at a token of ratio 1."""
    logprobs = torch.full((2, 2), -1.0, requires_grad=True)
    ones = torch.ones(2, 2)
    objective = PolicyObjective(
        advantages=3 * ones,
        mask=torch.tensor([[0.0, 1.0], [0.0, 1.0]]),
        old_logprobs=-ones,
        answer_weights=torch.tensor([7.0, 2.0]),
        weights=0.5 * ones,
        loss=PPO,
        ref_logprobs=-1.5 * ones,
        kl=KlSettings(0.8, "k2"),
        entropy_coef=0.1,
    )
    losses, sums = objective(TokenScores(logprobs[1:], lambda: 4 * ones[1:]), slice(1, 2))
    assert losses.tolist() == [[0.0, pytest.approx((-3 * 0.5 + 0.8 * 0.125 - 0.1 * 4) * 2)]]
    assert sums["entropy"] == 4
    assert sums["kl"] == pytest.approx(0.125)
