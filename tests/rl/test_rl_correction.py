"""Disagreement between training and rollout, and its correction, worked by hand."""

import math

import pytest
import torch

from hybrid3d.rl.correction import (
    CORRECTIONS,
    correction_weights,
    mismatch,
    mismatch_by_position,
    tokens_by_position,
)

MASK = torch.tensor([[0.0, 1.0, 1.0, 1.0], [0.0, 1.0, 0.0, 0.0]])
RATIOS = torch.tensor([[9.0, 4.0, 0.25, 1.5], [9.0, 3.0, math.nan, 0.0]])  # train / rollout


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("truncate", [[0.0, 2.0, 0.25, 1.5], [0.0, 2.0, 0.0, 0.0]]),
        ("mask", [[0.0, 0.0, 0.0, 1.5], [0.0, 0.0, 0.0, 0.0]]),
        ("sequence_truncate", [[0.0, 1.5, 1.5, 1.5], [0.0, 2.0, 0.0, 0.0]]),  # 4 x 1/4 x 3/2, and 3
        ("sequence_mask", [[0.0, 1.5, 1.5, 1.5], [0.0, 0.0, 0.0, 0.0]]),
        ("sequence_mean_mask", [[0.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]]),  # the third root of 3/2, and 3
    ],
)
def test_weights_by_hand(name: str, wanted: list[list[float]]) -> None:
    logprobs = RATIOS.log().requires_grad_()
    weights = correction_weights(name, logprobs, torch.zeros(2, 4), MASK, low=0.5, high=2.0)
    torch.testing.assert_close(weights, torch.tensor(wanted))
    assert not weights.requires_grad
    assert name in CORRECTIONS


def test_mismatch_by_hand() -> None:
    """Gaps 0.1, -0.2, 0.3 and 0.0; k3 of a gap d is e^d - 1 - d."""
    gaps = torch.tensor([[99.0, 0.1, -0.2, 0.3], [99.0, 0.0, 99.0, 99.0]])
    found, divergence = mismatch(gaps - 2.0, torch.full((2, 4), -2.0), MASK)
    assert found == {"max": pytest.approx(0.3), "p50": pytest.approx(0.2), "p99": pytest.approx(0.3)}
    assert divergence == pytest.approx(sum(math.expm1(d) - d for d in (0.1, -0.2, 0.3)), rel=1e-5)
    assert mismatch(gaps, gaps, 0 * MASK) == ({"max": 0.0, "p50": 0.0, "p99": 0.0}, 0.0)


def test_mismatch_by_position_by_hand() -> None:
    mask = torch.tensor([[0.0, 1.0, 1.0, 0.0, 1.0, 1.0], [0.0, 1.0, 1.0, 1.0, 0.0, 0.0]])  # with an environment's token
    gaps = torch.tensor([[0.0, 1.0, 2.0, 0.0, 4.0, 8.0], [0.0, 16.0, 32.0, 64.0, 0.0, 0.0]])
    assert mismatch_by_position(gaps, mask, 4).tolist() == [17.0, 34.0, 68.0, 8.0]
    assert tokens_by_position(torch.tensor([4, 3]), 4) == [2, 2, 2, 1]


@pytest.mark.parametrize("longest", [1, 3, 4, 10, 17])
def test_positions_are_counted_as_they_are_summed(longest: int) -> None:
    lengths = torch.arange(longest + 1)
    mask = (torch.arange(longest + 2)[None, :] < lengths[:, None]).float()
    counts = tokens_by_position(lengths, longest)
    assert mismatch_by_position(mask, mask, longest).tolist() == counts
    assert sum(counts) == int(lengths.sum())
