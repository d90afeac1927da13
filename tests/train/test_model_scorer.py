"""A reward model's scores of answers: in whole micro batches, in order, without those that can be no reward."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybrid3d.config import Recipe, load_recipe
from hybrid3d.rl.batch import Batch
from hybrid3d.scoring.scorer import Query
from hybrid3d.train.trained_model import ModelScorer
from run_ranks import ROOT

pytestmark = pytest.mark.engines


@pytest.mark.parametrize(
    ("layout", "rows"), [({}, 6), ({"pp": 4, "vpp": 2}, 8), ({"max_tokens_per_micro_batch": 99}, 5)]
)
def test_scores_of_any_number_of_answers(alone: dist.ProcessGroup, layout: dict[str, Any], rows: int) -> None:
    """Interleaved stages take whole rounds of micro batches."""
    asked: list[Batch] = []

    def scores(batch: Batch, recipe: Recipe) -> torch.Tensor:
        asked.append(batch)
        last = batch.tokens.gather(1, batch.lengths[:, None] - 1)[:, 0].float()
        return torch.where(last == 13, math.nan, last)

    recipe = load_recipe(ROOT / "recipes/demo-cpu.yaml")
    train = replace(recipe.train, tp=1, dp=1, **({"pp": 1, "micro_batch_size": 2} | layout))
    model: Any = SimpleNamespace(data_parallel_rank=0, is_reporting_rank=True, scores=scores)
    scorer = ModelScorer(model, replace(recipe, train=train), 0, alone)
    answers = [[5], [6, 7], [8, 9, 10], [13], [4]]
    found = scorer.score([Query("", "", "", row=i, prompt_ids=[1, 2], tokens=one) for i, one in enumerate(answers)])
    assert found.rewards == [5.0, 7.0, 10.0, 0.0, 4.0]
    assert (found.failures, found.examples) == ({"not_a_number": 1}, {"not_a_number": "row 3: nan"})
    (batch,) = asked
    assert len(batch) == rows
    assert batch.lengths[5:].tolist() == [3] * (rows - 5)
    assert scorer.score([]).rewards == []
