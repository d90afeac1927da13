"""Log-ratios: their bound before `exp`, and the gradient of an answer's shared ratio token by token."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from hybrid3d.rl.correction import CORRECTIONS, correction_weights, mismatch
from hybrid3d.rl.losses import MAX_LOG_RATIO, answer_weights, bounded, value_loss
from hybrid3d.rl.objective import (
    POLICY_LOSSES,
    KlSettings,
    LossSettings,
    PolicyObjective,
    Ratio,
    TokenScores,
    policy_loss,
)

LIMIT = math.exp(20)
ROWS = slice(None)
STRAIGHT_THROUGH = LossSettings(ratio="sequence_straight_through")
KINDS = [kind for kind in POLICY_LOSSES if not kind.endswith("cov") and kind != "reinforce"]  # its factor is A alone


def gradient_of(logprobs: Tensor, **settings: Any) -> tuple[Tensor, Tensor]:
    """Losses of a `PolicyObjective`, and the gradient of their sum with respect to the log-probabilities."""
    logprobs = logprobs.clone().requires_grad_()
    ones = torch.ones_like(logprobs)
    defaults = {"mask": ones, "old_logprobs": 0 * ones, "answer_weights": ones[:, 0], "loss": LossSettings()}
    objective = PolicyObjective(**({"advantages": ones} | defaults | settings))
    losses, _ = objective(TokenScores(logprobs, lambda: 0 * ones), ROWS)
    (gradient,) = torch.autograd.grad(losses.sum(), logprobs)
    return losses.detach(), gradient


def test_masked_token_of_gspo_has_no_gradient() -> None:
    """Mean log-ratio (0.3 - 0.1 + 0.2 + 0) / 4 = 0.1, A = 2: -2 exp(0.1) at each token that counts, 0 at the other."""
    logprobs = torch.tensor([[0.3, -0.1, 0.2, 0.0]], dtype=torch.float64)
    weights = torch.tensor([[1.0, 0.0, 1.0, 1.0]], dtype=torch.float64)
    losses, gradient = gradient_of(logprobs, advantages=0 * logprobs + 2, weights=weights, loss=STRAIGHT_THROUGH)
    each = -2 * math.exp(0.1)
    assert losses[0].tolist() == pytest.approx([each, 0, each, each])
    assert gradient[0].tolist() == pytest.approx([each, 0, each, each])
    assert gradient[0, 1] == 0


def test_weights_of_gspo_act_on_their_own_token() -> None:
    logprobs = torch.tensor([[0.1, -0.1, 0.0]], dtype=torch.float64)  # one ratio of 1
    weights = torch.tensor([[2.0, 0.5, 0.25]], dtype=torch.float64)
    _, gradient = gradient_of(logprobs, weights=weights, loss=STRAIGHT_THROUGH)
    assert gradient[0].tolist() == pytest.approx([-2.0, -0.5, -0.25])


@pytest.mark.parametrize("level", ["sequence", "sequence_straight_through"])
@pytest.mark.parametrize("clip", [0.2, 0.05])
def test_gspo_without_correction_is_the_papers_loss_of_whole_answers(clip: float, level: Ratio) -> None:
    """arXiv 2507.18071, equation 5, written out: the mean over answers of min(s A, clip(s) A); by autograd."""
    generator = torch.Generator().manual_seed(3)
    logprobs = -torch.rand(8, 6, generator=generator, dtype=torch.float64)
    old = logprobs + 0.3 * torch.randn(8, 6, generator=generator, dtype=torch.float64)
    mask = (torch.rand(8, 6, generator=generator) < 0.7).double()
    mask[:, 0] = 1
    advantages = torch.randn(8, 1, generator=generator, dtype=torch.float64)
    lengths = mask.sum(1)

    whole = logprobs.clone().requires_grad_()
    s = torch.exp(((whole - old) * mask).sum(1) / lengths)
    per_answer = -torch.minimum(s * advantages[:, 0], s.clamp(1 - clip, 1 + clip) * advantages[:, 0])
    (wanted,) = torch.autograd.grad(per_answer.mean(), whole)
    assert 0 < (wanted.abs().sum(1) == 0).sum() < 8  # some answers are clipped, some are not

    losses, gradient = gradient_of(
        logprobs,
        advantages=advantages.expand(8, 6),
        mask=mask,
        old_logprobs=old,
        answer_weights=answer_weights("sequence", lengths, 6),
        loss=LossSettings(clip=clip, ratio=level),
    )
    torch.testing.assert_close(losses.sum() / lengths.sum(), per_answer.mean().detach())
    torch.testing.assert_close(gradient / lengths.sum(), wanted)


@pytest.mark.parametrize("level", get_args(Ratio))
@pytest.mark.parametrize("gap", [89.0, 1000.0, 1e30])
@pytest.mark.parametrize(
    ("advantage", "loss"),
    [(1.0, -1.2), (0.0, 0.0), (-1.0, LIMIT)],  # clipped; nothing to learn; beyond every bound
)
def test_ratio_that_ran_away_has_a_finite_gradient(level: Ratio, gap: float, advantage: float, loss: float) -> None:
    """In float32, where exp(89) is infinite. The second answer's gradient is its own: -r A = -1."""
    logprobs = torch.tensor([[gap], [0.0]])
    advantages = torch.tensor([[advantage], [1.0]])
    losses, gradient = gradient_of(logprobs, advantages=advantages, loss=LossSettings(ratio=level))
    assert losses.flatten().tolist() == pytest.approx([loss, -1.0])
    assert gradient.flatten().tolist() == [0.0, -1.0]
    _, _, stats = policy_loss(logprobs, 0 * logprobs, advantages, torch.ones(2, 1), LossSettings(ratio=level))
    assert stats["approx_kl"].item() == pytest.approx(LIMIT - 21)
    assert stats["ratio"].item() == pytest.approx(LIMIT + 1)


def test_up_to_the_bound_gradients_are_the_ratio() -> None:
    logprobs, advantages = torch.tensor([[19.5, -19.5]]).double(), -torch.ones(1, 2).double()
    _, gradient = gradient_of(logprobs, advantages=advantages, loss=LossSettings(clip=1.0))
    assert gradient[0].tolist() == pytest.approx([math.exp(19.5), math.exp(-19.5)])


@pytest.mark.parametrize("gap", [89.0, -89.0])
def test_k3_of_a_reference_far_away_has_a_finite_gradient(gap: float) -> None:
    far = torch.tensor([[gap, -0.5]])
    losses, gradient = gradient_of(0 * far, advantages=0 * far, ref_logprobs=far, kl=KlSettings(1.0))
    assert losses[0].tolist() == pytest.approx([LIMIT - 21 if gap > 0 else 19.0, math.exp(-0.5) - 0.5])
    assert gradient[0].tolist() == pytest.approx(
        [0.0, 1 - math.exp(-0.5)]
    )  # of exp(x) - 1 - x with x = reference - policy


def test_mismatch_and_correction_are_bounded() -> None:
    gaps, ones = torch.tensor([[100.0, 0.0]]), torch.ones(1, 2)
    found, divergence = mismatch(gaps, 0 * gaps, ones)
    assert found["max"] == 100  # what is measured is told as it is
    assert divergence == pytest.approx(LIMIT - 21)
    for name, wanted in {"truncate": [1e30, 1], "mask": [1e30, 1], "sequence_mask": [1e30, 1e30]}.items():
        weights = correction_weights(name, gaps, 0 * gaps, ones, low=0.5, high=1e30)
        assert weights[0].tolist() == pytest.approx([min(value, LIMIT) for value in wanted])


@pytest.mark.parametrize("gap", [math.inf, -math.inf, 1e30, -20.1, 20.1])
def test_bound(gap: float) -> None:
    value = torch.tensor(gap, requires_grad=True)
    held = bounded(value)
    held.backward()
    assert held.item() == math.copysign(MAX_LOG_RATIO, gap)
    assert value.grad == 0


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"advantages": torch.zeros(2, 3)},
        {"advantages": -torch.ones(2, 3), "loss": LossSettings(dual_clip=3.0)},
        {"loss": STRAIGHT_THROUGH},
        {"ref_logprobs": torch.zeros(2, 3), "kl": KlSettings(0.1)},
        {"ref_logprobs": torch.zeros(2, 3), "kl": KlSettings(0.1, clamp=1.0)},
        *({"loss": LossSettings(kind=kind)} for kind in KINDS),
    ],
    ids=["clipped", "no advantage", "dual clip", "sequence", "reference", "clamped", *KINDS],
)
@pytest.mark.parametrize("where", ["logprobs", "old"])
def test_nan_reaches_the_gradient(settings: dict[str, Any], where: str) -> None:
    """A bound must not hide a model that is broken: its gradient is what the guard looks at."""
    values = {"logprobs": torch.zeros(2, 3), "old": torch.zeros(2, 3)}
    values[where][0, 1] = math.nan
    _, gradient = gradient_of(values["logprobs"], old_logprobs=values["old"], **settings)
    assert gradient[0, 1].isnan()
    assert gradient[1].isfinite().all()


def test_nan_of_the_reference_reaches_the_gradient() -> None:
    reference = torch.tensor([[0.0, math.nan]])
    _, gradient = gradient_of(torch.zeros(1, 2), ref_logprobs=reference, kl=KlSettings(0.1))
    assert gradient[0, 1].isnan()


@pytest.mark.parametrize("name", list(CORRECTIONS))
def test_nan_of_the_rollout_reaches_the_gradient(name: str) -> None:
    rollout, ones = torch.tensor([[0.0, math.nan]]), torch.ones(1, 2)
    weights = correction_weights(name, 0 * ones, rollout, ones, low=0.5, high=2.0)
    _, gradient = gradient_of(torch.zeros(1, 2), weights=weights)
    assert gradient[0, 1].isnan()
    assert math.isnan(mismatch(0 * ones, rollout, ones)[1])


def test_values_within_the_clip_are_never_counted_as_clipped() -> None:
    """100,000 values in float32 within 0.2 of the old ones: old + (value - old) is often not quite the value."""
    generator = torch.Generator().manual_seed(0)
    old, values = 0.19 * torch.rand(2, 1, 100_000, generator=generator)
    assert (old + (values - old) != values).sum() > 1000
    returns, ones = torch.randn(old.shape, generator=generator), torch.ones_like(old)
    losses, stats = value_loss(values, old, returns, ones, clip=0.2)
    assert stats["value_clip_fraction"] == 0
    torch.testing.assert_close(losses, 0.5 * (values - returns).square(), rtol=0, atol=0)


def test_values_beyond_clip_count_where_the_bounded_error_is_larger() -> None:
    """Old 1, clip 1/2: 2 becomes 1.5 and 0 becomes 0.5. At the edge, 1.5, nothing is cut."""
    values = torch.tensor([[2.0, 2.0, 0.0, 0.0, 1.5, 0.5]])
    returns = torch.tensor([[3.0, 0.0, -1.0, 3.0, 3.0, 3.0]])
    losses, stats = value_loss(values, torch.ones(1, 6), returns, torch.ones(1, 6), clip=0.5)
    assert (2 * losses)[0].tolist() == [2.25, 4.0, 2.25, 9.0, 2.25, 6.25]
    assert stats["value_clip_fraction"] == 2
