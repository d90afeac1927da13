"""Losses against plain Python, gradients against closed forms, and sums over parts against the whole."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybrid3d.rl.grpo import sft_loss
from hybrid3d.rl.losses import masked_sum, policy_loss

CLIP = 0.2


def one_token(ratio: float, advantage: float) -> tuple[float, float, float]:
    """Loss, gradient of it in logprobs, and whether it counts as clipped, of a single token with this ratio."""
    logprobs = torch.tensor([[math.log(ratio) - 3.0]], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([[-3.0]], dtype=torch.float64)
    ones = torch.ones(1, 1, dtype=torch.float64)
    loss, stats = policy_loss(logprobs, old, torch.tensor([advantage], dtype=torch.float64), ones, CLIP)
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


def random_batch(rows: int, width: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logprobs, old_logprobs, advantages, mask in float64; ratios well past the clip on both sides."""
    generator = torch.Generator().manual_seed(seed)
    logprobs = -torch.rand(rows, width, generator=generator, dtype=torch.float64) * 3
    old = logprobs + torch.randn(rows, width, generator=generator, dtype=torch.float64) * 0.4
    advantages = torch.randn(rows, generator=generator, dtype=torch.float64)
    mask = (torch.rand(rows, width, generator=generator) < 0.7).double()
    mask[0, 0] = 1.0
    return logprobs, old, advantages, mask


def test_values_and_stats_against_plain_python() -> None:
    logprobs, old, advantages, mask = random_batch(5, 9, seed=1)
    loss, stats = policy_loss(logprobs, old, advantages, mask, CLIP)
    sums = {"ratio": 0.0, "clip_fraction": 0.0, "old_kl": 0.0}
    for b in range(5):
        advantage = advantages[b].item()
        for t in range(9):
            if not mask[b, t]:
                assert loss[b, t] == 0
                continue
            ratio = math.exp(logprobs[b, t].item() - old[b, t].item())
            clipped = min(max(ratio, 0.8), 1.2)
            assert loss[b, t].item() == pytest.approx(-min(ratio * advantage, clipped * advantage), abs=1e-12)
            sums["ratio"] += ratio
            sums["clip_fraction"] += (ratio > 1.2 and advantage > 0) or (ratio < 0.8 and advantage < 0)
            sums["old_kl"] += ratio - 1 - math.log(ratio)
    assert sums["clip_fraction"] > 3
    assert {name: value.item() for name, value in stats.items()} == pytest.approx(sums, abs=1e-12)
    assert not any(value.requires_grad for value in stats.values())


def test_gradients_flow_into_the_trained_policy_only() -> None:
    logprobs, old, advantages, mask = (tensor.requires_grad_() for tensor in random_batch(2, 3, seed=2))
    policy_loss(logprobs, old, advantages, mask.detach(), CLIP)[0].sum().backward()
    assert logprobs.grad is not None
    assert old.grad is None
    assert advantages.grad is None


def test_padding_may_hold_anything() -> None:
    logprobs = torch.tensor([[-1.0, 500.0, -math.inf, math.nan]], requires_grad=True)
    old = torch.tensor([[-1.1, -500.0, 0.0, 0.0]])
    mask = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    loss, stats = policy_loss(logprobs, old, torch.tensor([1.0]), mask, CLIP)
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
def test_any_split_has_the_loss_and_gradient_of_the_whole(cuts: list[int], seed: int, algorithm: str) -> None:
    """Parts of unequal size and with unequal shares of padding, empty ones too."""
    logits, old, advantages, mask = random_batch(12, 6, seed)
    tokens = int(mask.sum())

    def loss(weights: Tensor, part: slice) -> Tensor:
        logprobs = torch.nn.functional.logsigmoid(weights[part])
        if algorithm == "sft":
            return masked_sum(sft_loss(logprobs, part)[0], mask[part]) / tokens
        per_token, _ = policy_loss(logprobs, old[part], advantages[part], mask[part], CLIP)
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
    losses, _ = sft_loss(logprobs, slice(0, 2))
    torch.testing.assert_close(masked_sum(losses, mask) / 4, expected)


def test_one_advantage_a_sequence() -> None:
    logprobs, old, _, mask = random_batch(2, 3, seed=4)
    with pytest.raises(ValueError, match=r"expected advantages \[2\], one a sequence, got \(2, 3\)"):
        policy_loss(logprobs, old, torch.zeros(2, 3), mask, CLIP)
