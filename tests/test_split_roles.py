"""The roles on different ranks, without ranks: how far generation runs ahead, and how results are exchanged."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from hybrid3d.config import load_recipe
from hybrid3d.generation.rollouts import FailedRewards
from hybrid3d.generation.samples import RolloutBatch
from hybrid3d.roles.split.exchange import announce_update, is_updated, share
from hybrid3d.roles.split.generation import GenerationRank
from hybrid3d.run.metrics import Stopwatch

pytestmark = pytest.mark.engines

DEMO = Path(__file__).resolve().parent.parent / "recipes" / "demo-cpu.yaml"


class FakeRollouts:
    """Generates batches that name their weights and their first batch of prompts; each took two batches of prompts."""

    def __init__(self) -> None:
        self.generated: list[tuple[int, int]] = []
        self.before: Callable[[], None] = lambda: None

    def generate_batch(self, version: int, batch: int, recipe: Any) -> RolloutBatch:
        self.before()
        self.generated.append((version, batch))
        return RolloutBatch([], batches=2, zero_variance_groups=0)


def role(alone: dist.ProcessGroup) -> tuple[Any, FakeRollouts]:
    rank, rollouts = object.__new__(GenerationRank), FakeRollouts()
    rank._groups = SimpleNamespace(own=alone, everyone=alone, store=dist.HashStore())
    rank._sync = SimpleNamespace(begin=lambda version, verify: None, bucket_ready=lambda bucket, last: None)
    rank._first, rank._rollouts, rank._ahead, rank._next_batch, rank._busy = 0, rollouts, deque(), 0, Stopwatch()
    return rank, rollouts


def recipe_of(bound: int, steps: int = 40) -> Any:
    more = ["roles.generation.ranks=2", "algorithm.correction.kind=truncate", f"async.max_staleness={bound}"]
    return load_recipe(DEMO, [*more, f"run.steps={steps}"])


def run_step(rank: Any, step: int, batch: int, recipe: Any) -> int:
    generated = rank.generate_batch(step, batch, recipe)
    if step < recipe.run.steps:
        rank.update(None, step, recipe)
    return batch + int(generated.batches)


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_slow_updates_let_generation_run_ahead_up_to_the_bound(alone: dist.ProcessGroup, bound: int) -> None:
    """Prompts are used in order, and the samples of step s are from weights s - bound, or the first ones."""
    (rank, rollouts), recipe, batch = role(alone), recipe_of(bound, steps=6), 10
    for step in range(7):
        batch = run_step(rank, step, batch, recipe)
    assert rollouts.generated == [(max(0, step - bound), 10 + 2 * step) for step in range(7)]


def test_generation_joins_the_sync_when_the_update_is_done(alone: dist.ProcessGroup) -> None:
    (rank, rollouts), recipe = role(alone), recipe_of(4)
    rollouts.before = lambda: announce_update(rank._groups.store, 0)  # while the next samples are generated
    run_step(rank, 0, 0, recipe)
    assert rollouts.generated == [(0, 0), (0, 2)]
    run_step(rank, 1, 2, recipe)  # which has samples; update 1 is not done before four steps are ahead
    assert rollouts.generated[2:] == [(1, batch) for batch in (4, 6, 8, 10)]


def test_an_error_ahead_is_raised_by_the_step_that_needs_the_samples(alone: dist.ProcessGroup) -> None:
    (rank, rollouts), recipe = role(alone), recipe_of(1)
    rank.generate_batch(0, 0, recipe)

    def fail() -> None:
        raise FailedRewards("no reward today")

    rollouts.before = fail
    rank.update(None, 0, recipe)
    with pytest.raises(FailedRewards, match="no reward today") as raised:
        rank.generate_batch(1, 2, recipe)
    assert raised.value.raised_in_all_roles


def test_an_error_of_one_rank_is_not_shared(alone: dist.ProcessGroup) -> None:
    def fail() -> None:
        raise ValueError("of this rank")

    with pytest.raises(ValueError, match="of this rank"):
        share(fail, alone, 0)


def test_an_update_is_done_when_it_is_announced() -> None:
    store = dist.HashStore()
    assert not is_updated(store, 0)
    announce_update(store, 3)
    assert [is_updated(store, step) for step in (2, 3, 4)] == [True, True, False]
