"""The checkpoint of a reference policy: it must fit the train layout and read the policy's tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from hybrid3d.config import Recipe, RecipeError, load_recipe
from hybrid3d.inputs.models import read_config
from hybrid3d.launch.preflight import check_reference

pytestmark = [pytest.mark.engines]

ROOT = Path(__file__).resolve().parents[2]
POLICY, TEACHER = "qwen3_moe", "qwen2"


def recipe_of(teacher: Path, *settings: str) -> Recipe:
    kl = f"algorithm.kl={{where: reward, estimator: k1, coef: 1, reference: {teacher}}}"
    return load_recipe(ROOT / "recipes/demo-cpu.yaml", [kl, "train.router_replay=rollout", *settings])


def test_teacher_without_experts_may_teach_a_policy_that_replays_them(tiny_checkpoint: Callable[..., Path]) -> None:
    check_reference(read_config(tiny_checkpoint(POLICY)), recipe_of(tiny_checkpoint(TEACHER)))


@pytest.mark.parametrize(
    ("changed", "settings", "said"),
    [
        ({}, ["train.tp=3", "train.pp=1"], "train.tp=3"),
        ({"max_position_embeddings": 8}, [], "reads at most 8 tokens, fewer than rollout.max_model_len="),
    ],
)
def test_reference_that_does_not_fit_is_refused_with_the_setting(
    changed: dict[str, int], settings: list[str], said: str, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    source = tiny_checkpoint(TEACHER)
    (tmp_path / "config.json").write_text(json.dumps(json.loads((source / "config.json").read_text()) | changed))
    with pytest.raises(RecipeError) as error:
        check_reference(read_config(tiny_checkpoint(POLICY)), recipe_of(tmp_path, *settings))
    assert error.value.subject == f"algorithm.kl.reference {tmp_path}"
    assert said in str(error.value)


def test_reference_with_another_vocabulary_is_refused_with_both_sizes(tiny_checkpoint: Callable[..., Path]) -> None:
    policy = read_config(tiny_checkpoint(POLICY)) | {"vocab_size": 1000}
    with pytest.raises(RecipeError, match=r"has a vocabulary of 330 tokens, the policy 1000"):
        check_reference(policy, recipe_of(tiny_checkpoint(TEACHER)))
