"""Which samples an update learns from, and each token's gradient there, whatever the ranks and the packing."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid3d.config import Recipe, load_recipe
from hybrid3d.rl.batch import Batch
from hybrid3d.rl.objective import PolicyObjective, TokenScores
from hybrid3d.run.health import Guard
from hybrid3d.run.metrics import StepMetrics
from hybrid3d.train.dp_split import shares_of
from hybrid3d.train.trained_model import StepReport
from hybrid3d.trainer.learner import Learner
from hybrid3d.trainer.step_experience import Experience

pytestmark = pytest.mark.engines

ROOT = Path(__file__).resolve().parents[2]
PROMPT, WIDTH, SAMPLES, MINIBATCHES = 2, 12, 16, 4
ANSWERS = torch.randint(1, WIDTH - PROMPT + 1, (SAMPLES,), generator=torch.Generator().manual_seed(5)).tolist()
LAYOUTS = {
    "dp 1": ["train.dp=1"],
    "dp 2": ["train.dp=2"],
    "dp 4": ["train.dp=4"],
    "dp 1 packed": ["train.dp=1", "train.packed=true"],
    "dp 2 packed": ["train.dp=2", "train.packed=true"],
    "dp 2 by tokens": ["train.dp=2", "train.max_tokens_per_micro_batch=200"],
}


def recipe_of(layout: str) -> Recipe:
    settings = ["algorithm.name=gspo", f"algorithm.minibatches={MINIBATCHES}", "train.micro_batch_size=1"]
    return load_recipe(ROOT / "recipes/demo-cpu.yaml", [*settings, *LAYOUTS[layout]])


def in_update(shares: list[list[int]], number: int) -> set[int]:
    """The samples whose rows, on any rank, `Learner` takes for this update."""
    each = len(shares[0]) // MINIBATCHES
    return {i for share in shares for i in share[number * each : (number + 1) * each]}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_update_has_the_same_samples_in_every_layout(layout: str) -> None:
    shares = shares_of(recipe_of(layout), ANSWERS, MINIBATCHES)
    assert len({len(share) for share in shares}) == 1
    assert [in_update(shares, k) for k in range(MINIBATCHES)] == [set(range(4 * k, 4 * k + 4)) for k in range(4)]


def test_consecutive_and_balanced_within_a_minibatch() -> None:
    lengths = [1, 1, 9, 9, 2, 2, 2, 2]
    assert shares_of(recipe_of("dp 2"), lengths, 2) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    balanced = shares_of(recipe_of("dp 2 packed"), lengths, 2)
    assert [sorted(lengths[i] for i in share) for share in balanced] == [[1, 2, 2, 9]] * 2


def test_ranks_have_consecutive_sequences_without_minibatches() -> None:
    """As supervised training asks for them, whatever the recipe's minibatches."""
    assert shares_of(recipe_of("dp 2"), [1] * 6) == [[0, 1, 2], [3, 4, 5]]
    assert shares_of(recipe_of("dp 1"), [1] * 3) == [[0, 1, 2]]


def test_sequences_that_do_not_divide_are_refused_with_the_numbers() -> None:
    message = "12 sequences do not divide into 4 minibatches on 2 data-parallel ranks"
    with pytest.raises(ValueError, match=message):
        shares_of(recipe_of("dp 2"), [1] * 12, 4)


class Policy:
    """One data-parallel rank's policy, which keeps every update's gradient by sample. Its log-probabilities stay."""

    is_reporting_rank = True

    def __init__(self, rank: int, all_tokens: list[int], logprobs: Tensor):
        self.data_parallel_rank, self._all_tokens, self._logprobs = rank, all_tokens, logprobs
        self.updates: list[dict[int, Tensor]] = []

    def train_step(self, batch: Batch, loss: PolicyObjective, recipe: Recipe, *_: Any) -> StepReport:
        samples = batch.tokens[:, 0]
        width = batch.tokens.shape[1]
        logprobs = self._logprobs[samples, :width].clone().requires_grad_()
        losses, _ = loss(TokenScores(logprobs, lambda: torch.zeros_like(logprobs)), slice(None))
        (gradient,) = torch.autograd.grad((losses * batch.response_mask).sum(), logprobs)
        gradient = torch.nn.functional.pad(gradient, (0, WIDTH - width)) / self._all_tokens[len(self.updates)]
        self.updates.append(dict(zip(samples.tolist(), gradient, strict=True)))
        return StepReport({}, grad_norm=1.0, lr=0.1, updated=True)

    def end_step(self) -> None:
        pass


def updates_of(layout: str) -> list[dict[int, Tensor]]:
    """Each update's gradient of every sample, [T], gathered over data-parallel ranks."""
    recipe = recipe_of(layout)
    generator = torch.Generator().manual_seed(6)
    old = -torch.rand(SAMPLES, WIDTH, generator=generator, dtype=torch.float64)
    now = old + 1e-4 * torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64)
    advantages = torch.randn(SAMPLES, 1, generator=generator, dtype=torch.float64).expand(SAMPLES, WIDTH)
    shares = shares_of(recipe, [PROMPT + n for n in ANSWERS], MINIBATCHES)
    lengths = torch.tensor([[ANSWERS[i] for i in share] for share in shares])
    each = lengths.shape[1] // MINIBATCHES
    tokens = [int(lengths[:, k * each : (k + 1) * each].sum()) for k in range(MINIBATCHES)]
    found: list[dict[int, Tensor]] = [{} for _ in range(MINIBATCHES)]
    for rank, share in enumerate(shares):
        policy = Policy(rank, tokens, now)
        models = SimpleNamespace(
            policy=policy, reference=None, critic=None, reward_model=None, trained={"policy": policy}
        )
        learner = Learner(recipe, models, Guard(None), 0, None)  # type: ignore[arg-type]
        batch = Batch.from_sequences([[i] * (PROMPT + ANSWERS[i]) for i in share], [PROMPT] * len(share), pad_id=0)
        width = batch.tokens.shape[1]
        rollout, before, of_share = [values[share][:, :width] for values in (old, old, advantages)]
        experience = Experience(
            [],
            StepMetrics(),
            share,
            batch,
            lengths,
            torch.tensor(shares),
            torch.ones_like(lengths, dtype=torch.bool),
            batch.response_mask,
            rollout,
            before,
            None,
            0.0,
            advantages=of_share,
        )
        learner.update(experience, 0, recipe)
        for of_all, of_rank in zip(found, policy.updates, strict=True):
            of_all |= of_rank
    return found


@pytest.mark.parametrize("layout", list(LAYOUTS)[1:])
def test_tokens_gradient_is_the_same_in_every_layout(layout: str) -> None:
    wanted, found = updates_of("dp 1"), updates_of(layout)
    assert [sorted(update) for update in found] == [sorted(update) for update in wanted]
    for of, to in zip(found, wanted, strict=True):
        for sample, gradient in to.items():
            assert gradient.abs().sum() > 0
            torch.testing.assert_close(of[sample], gradient, rtol=1e-12, atol=1e-15)
