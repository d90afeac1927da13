"""The predicted fraction of bfloat16 weights that an update changes, worked by hand and against PyTorch's Adam."""

from __future__ import annotations

import math

import pytest
import torch
from predicted_changes import adam_step_size, change_probability

WEIGHTS = 100_000
BETAS, EPS = (0.9, 0.999), 1e-8


def probability(weight: float, step: float, updates: float) -> float:
    return float(change_probability(torch.tensor([weight], dtype=torch.bfloat16), step, updates))


@pytest.mark.parametrize("weight", [1.5, -1.5, 1.0078125])
def test_initial_update_changes_what_moves_more_than_half_a_spacing(weight: float) -> None:
    half = 2**-8
    assert probability(weight, half * 1.01, 0) == 1
    assert probability(weight, half * 0.99, 0) == 0
    for step, changes in ((half * 1.01, True), (half * 0.99, False)):  # what rounding makes of it
        for moved in (weight + step, weight - step):
            assert (float(torch.tensor(moved).bfloat16()) != weight) is changes


@pytest.mark.parametrize(("step", "changing"), [(1.01 * 2**-8, 2), (0.99 * 2**-8, 1), (1.01 * 2**-9, 1), (2**-10, 0)])
def test_below_a_power_of_two_weights_are_twice_as_dense(step: float, changing: int) -> None:
    assert sum(float(torch.tensor(moved).bfloat16()) != 1 for moved in (1 + step, 1 - step)) == changing
    assert probability(1.0, step, 0) == probability(-1.0, step, 0) == changing / 2


def test_long_run_probability_is_the_part_of_a_spacing() -> None:
    spacing = 2**-7
    assert probability(1.5, spacing / 4, math.inf) == 1 / 4
    assert probability(1.0, spacing / 4, math.inf) == (1 / 4 + 1 / 2) / 2
    assert probability(1.5, spacing * 4, math.inf) == probability(1.5, spacing * 4, 1) == 1


def test_starting_points_reach_twice_as_far_as_the_steps_made() -> None:
    """Independent steps (beta1 = 0) of a quarter spacing: after 1, 4 and 9 of them, starts go up to 1/2, 1 and 3/2.

    From 1/4 to 1/2 and from 5/4 to 3/2 they cross a middle.
    """
    weight, step = torch.tensor([1.5], dtype=torch.bfloat16), 2**-9
    for updates, expected in ((1, 1 / 2), (4, 1 / 4), (9, 1 / 3), (10**6, 1 / 4)):
        assert float(change_probability(weight, step, updates, beta1=0)) == pytest.approx(expected, rel=1e-3)
        assert float(change_probability(weight, 0.24 * step, 1, beta1=0)) == 0


def test_zeros_and_weights_that_stay() -> None:
    for updates in (0, 1, 100, math.inf):
        assert probability(0.0, 1e-9, updates) == 1
        assert probability(0.0, 0.0, updates) == probability(1.5, 0.0, updates) == 0


def test_momentum_makes_steps_smaller_and_overlap() -> None:
    """beta1 = 0.8: the second step is sqrt((1.64 / 0.36) / (1.8 / 0.2)) = 0.711 of the first; later none is smaller.

    9 updates overlap: after 36, the distance is that of sqrt(36 x 9) = 18 equal steps, and goes up to 36.
    """
    weight, spacing = torch.tensor([1.5], dtype=torch.bfloat16), 2**-7
    starts, step = 0.4, 0.2 * math.sqrt((1.64 / 0.36) / (1.8 / 0.2))
    crossing = starts - (0.5 - step)
    assert float(change_probability(weight, 0.2 * spacing, 1, beta1=0.8)) == pytest.approx(crossing / starts, rel=2e-3)
    step, starts = 0.9 / 36, 0.9
    assert float(change_probability(weight, step * spacing, 36, beta1=0.8)) == pytest.approx(step / starts, rel=2e-3)


class AdamRun:
    """Weights in float32, stepped by PyTorch's Adam on noise with some signal, and the bfloat16 weights of them."""

    def __init__(self, lr: float, offset: float = 0.0):
        """
        Args:
            offset: start up to this many spacings from a bfloat16 value.
        """
        self._random = torch.Generator().manual_seed(1)
        start = self._normal().mul(0.05).bfloat16()
        spacing = start.abs().float().log2().floor().sub(7).exp2()
        uniform = torch.rand(WEIGHTS, generator=self._random) * 2 - 1
        self.main = torch.nn.Parameter(start.float() + offset * spacing * uniform)
        self.signal = 0.2 * self._normal()
        self.lr, self.updates = lr, 0
        self._adam = torch.optim.Adam([self.main], lr=lr, betas=BETAS, eps=EPS)

    def _normal(self) -> torch.Tensor:
        return torch.randn(WEIGHTS, generator=self._random)

    @property
    def weights(self) -> torch.Tensor:
        return self.main.detach().bfloat16()

    @property
    def step_size(self) -> torch.Tensor | float:
        state = self._adam.state[self.main]
        if not state:
            return self.lr
        beta1, beta2 = BETAS
        return adam_step_size(
            state["exp_avg"], state["exp_avg_sq"], self.updates, lr=self.lr, beta1=beta1, beta2=beta2, eps=EPS
        )

    def update(self) -> float:
        """Make an update and return the fraction of weights that it changed."""
        before = self.weights
        self.main.grad = 1e-5 * (self.signal + self._normal())
        self._adam.step()
        self.updates += 1
        return float((self.weights != before).double().mean())


def test_step_size_is_that_of_torch() -> None:
    run = AdamRun(1e-2)
    for _ in range(3):
        before = run.main.detach().clone()
        run.update()
        moved = (run.main.detach() - before).abs()
        torch.testing.assert_close(run.step_size, moved, rtol=1e-3, atol=1e-7)  # rounded to float32 at weights


@pytest.mark.parametrize("lr", [1e-6, 1e-5, 1e-4])
def test_updates_of_a_fresh_checkpoint(lr: float) -> None:
    """The first updates move all weights alike: those of one exponent, so of equal spacing, change at the same time."""
    run, tolerances = AdamRun(lr), {1: 0.02, 2: 0.25, 3: 0.4, 6: 0.1, 11: 0.1, 25: 0.1}
    for number in range(1, 26):
        probability = change_probability(run.weights, run.step_size, run.updates) if number in tolerances else None
        changed = run.update()
        if probability is not None:
            predicted = float(probability.mean())
            assert predicted == pytest.approx(changed, rel=tolerances[number]), f"update {number}"


@pytest.mark.parametrize("lr", [1e-6, 1e-5, 1e-4])
def test_updates_of_weights_that_have_moved_for_long(lr: float) -> None:
    run = AdamRun(lr, offset=0.5)
    for _ in range(20):
        run.update()
    predicted = float(change_probability(run.weights, run.step_size, math.inf).mean())
    fresh = float(change_probability(run.weights, run.step_size, run.updates).mean())
    changed = run.update()
    assert predicted == pytest.approx(changed, rel=0.1 if lr < 1e-5 else 0.04)
    assert lr > 1e-6 or fresh < 0.8 * changed
