"""Which groups a step takes of those that are drawn, and what is told of held-out answers."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from hybrid3d.config import Recipe, load_recipe
from hybrid3d.generation.rollouts import Rollouts
from hybrid3d.generation.samples import Sample
from hybrid3d.rewards.scorer import Scores
from run_ranks import ROOT


def sample(prompt: str, reward: float) -> Sample:
    return Sample(prompt, (1,), (2,), (True,), (-0.5,), "", reward, versions=(0,))


@pytest.fixture
def rollouts() -> Any:
    """Without an engine, for what comes after it."""
    made = object.__new__(Rollouts)
    made._recipe = recipe_of(0)
    return made


def recipe_of(extra_batches: int) -> Recipe:
    settings = ["algorithm.prompts_per_step=4", "algorithm.samples_per_prompt=2", "train.micro_batch_size=4"]
    more = ["rollout.temperature=0.7", f"algorithm.dynamic_sampling={extra_batches}"]
    return load_recipe(ROOT / "recipes/demo-cpu.yaml", [*settings, *more])


def test_groups_that_teach_nothing_fill_up_where_they_were_drawn(rollouts: Any) -> None:
    """`+` a group whose rewards differ, `-` one whose do not: all of the former, the first of the latter, as made."""
    batches = ["-+--", "--+-", "++++"]
    asked: list[int] = []

    def generate_samples(version: int, batch: int, temperature: float) -> tuple[list[Sample], list[Scores]]:
        assert (version, temperature) == (3, 0.7)
        asked.append(batch)
        groups = enumerate(batches[batch - 7])
        return [sample(f"{batch - 7}{i}", n * (kind == "+")) for i, kind in groups for n in (0, 1)], []

    rollouts._generate_samples = generate_samples
    batch = rollouts.generate_batch(version=3, batch=7, recipe=recipe_of(1))
    assert [one.prompt for one in batch.samples[::2]] == ["00", "01", "02", "12"]
    assert [one.prompt for one in batch.samples[1::2]] == ["00", "01", "02", "12"]
    assert (batch.batches, batch.zero_variance_groups, asked) == (2, 6, [7, 8])
    batch = rollouts.generate_batch(version=3, batch=7, recipe=recipe_of(5))
    assert [one.prompt for one in batch.samples[::2]] == ["01", "12", "20", "21"]
    batch = rollouts.generate_batch(version=3, batch=7, recipe=recipe_of(0))
    assert [one.prompt for one in batch.samples[::2]] == ["00", "01", "02", "03"]


def test_held_out_answers(rollouts: Any) -> None:
    """Full reward is 1, and what fails is told."""
    rollouts._engine = SimpleNamespace(replica=0, replicas=1)
    rollouts.held_out = SimpleNamespace(examples=(None,) * 4)
    rollouts._multi_turn = SimpleNamespace(run=lambda examples, seeds, version: examples)
    scores = [Scores([], {"timeout": 1}, {"timeout": "first"}), Scores([], {"timeout": 2}, {"timeout": "second"})]
    rollouts._scored = lambda held: ([sample("", reward) for reward in (1.0, 1.1, 0.5, 0.0)], scores)
    found = rollouts.evaluate(0)
    assert (found.accuracy, found.reward) == (0.25, pytest.approx(0.65))
    assert (found.failures, found.examples) == ({"timeout": 3}, {"timeout": "first"})


def test_a_reward_model_leaves_the_reward_by_name_to_held_out_answers(rollouts: Any) -> None:
    """Its references in the training data may be of any kind, and are not judged by."""
    asked: list[str] = []
    held = SimpleNamespace(
        example=SimpleNamespace(prompt="", prompt_ids=(1,), answer="right"), tokens=[2], loss_mask=[True],
        logprobs=[-0.5], failure="", message="", versions=[6],
    )  # fmt: skip
    versions: list[int] = []

    def run(examples: list[Any], seeds: list[int] | None, version: int, temperature: float = 1.0) -> list[Any]:
        versions.append(version)
        assert temperature == (1.0 if seeds is None else 0.7)
        return [held] * len(examples)

    def score(items: list[tuple[str, str, str]]) -> Scores:
        asked.extend(reference for _, reference, _ in items)
        return Scores([1.0] * len(items))

    rollouts._engine = SimpleNamespace(replica=0, replicas=1, leads=True)
    rollouts._tokenizer = SimpleNamespace(decode=lambda tokens, skip_special_tokens: "")
    rollouts._scorer = SimpleNamespace(score=score)
    rollouts.train = SimpleNamespace(batch=lambda batch, prompts: [None] * prompts)
    rollouts.held_out = SimpleNamespace(examples=[None])
    rollouts._multi_turn = SimpleNamespace(run=run)
    rollouts._of_all_replicas = list
    batch = rollouts.generate_batch(3, 0, recipe_of(0))
    assert [(one.reward, one.weight_version) for one in batch.samples] == [(1.0, 6)] * 8
    assert asked == ["right"] * 8
    rollouts._recipe = replace(rollouts._recipe, reward=replace(rollouts._recipe.reward, model="judge"))
    batch = rollouts.generate_batch(4, 0, recipe_of(0))
    assert ([one.reward for one in batch.samples], batch.zero_variance_groups) == ([0.0] * 8, 0)
    assert len(asked) == 8
    assert rollouts.evaluate(5).accuracy == 1.0
    assert len(asked) == 9
    assert versions == [3, 4, 5]
