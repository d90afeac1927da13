"""The table of algorithms, and what recipes say of it."""

from dataclasses import replace
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import torch

from hybrid3d.config import Algorithm, load_recipe
from hybrid3d.rl.algorithms import ALGORITHMS
from hybrid3d.rl.correction import CORRECTIONS
from hybrid3d.rl.kl import ESTIMATORS

ROOT = Path(__file__).resolve().parent.parent


def test_recipes_know_the_rows_and_no_others() -> None:
    hints = get_type_hints(Algorithm)
    assert {*get_args(hints["name"])} == {*ALGORITHMS, "sft"}
    assert {*get_args(get_type_hints(hints["correction"])["kind"])} == {*CORRECTIONS, "none"}
    estimators, _ = get_args(get_type_hints(hints["kl"])["estimator"])  # or None
    assert {*get_args(estimators)} == {*ESTIMATORS}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_what_compares_answers_is_refused_without_two_of_them(name: str) -> None:
    algorithm = replace(load_recipe(ROOT / "recipes/demo-cpu.yaml").algorithm, name=name)
    rewards = torch.tensor([1.0, 0.0])
    if algorithm.uses_groups:
        with pytest.raises(ValueError, match="2 or more samples of a prompt"):
            ALGORITHMS[name].advantages(rewards, 1)
    else:
        assert ALGORITHMS[name].advantages(rewards, 1).tolist() == [1.0, 0.0]
