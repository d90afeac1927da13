"""Which groups a step takes of those that are drawn, and what is told of held-out answers."""

from __future__ import annotations

import pickle
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from hybrid3d.config import Agents, Recipe, load_recipe
from hybrid3d.generation.engine import Sampling
from hybrid3d.generation.replicas import EngineReplicas, NoReplicas, ReplicaScorer
from hybrid3d.generation.rollouts import Rollouts
from hybrid3d.generation.samples import (
    NO_ANSWER,
    NO_BRANCH,
    AnswerTokens,
    Sample,
    answer_numbers,
    answers_of,
    filled_up,
)
from hybrid3d.generation.scheduler import Answers
from hybrid3d.rl.data import Example
from hybrid3d.scoring.scorer import Given, Query, Scorers, Scores
from hybrid3d.train.dp_split import spread_over
from run_ranks import ROOT


def sample(prompt: str, reward: float) -> Sample:
    return Sample(prompt, (1,), (2,), (True,), (-0.5,), "", reward, versions=(0,), scored=True)


NOTHING_TO_SCORE = Given(SimpleNamespace(score=lambda queries: Scores([0.0 for _ in queries])))


@pytest.fixture
def rollouts() -> Any:
    """Without an engine, for what comes after it."""
    scorers = Scorers(NOTHING_TO_SCORE, NOTHING_TO_SCORE)
    return Rollouts(recipe_of(0), SimpleNamespace(numbers=(0,)), scorers, None, None)  # type: ignore[arg-type]


def recipe_of(extra_batches: int) -> Recipe:
    settings = ["algorithm.prompts_per_step=4", "algorithm.samples_per_prompt=2", "train.micro_batch_size=4"]
    more = ["rollout.temperature=0.7", f"algorithm.dynamic_sampling={extra_batches}"]
    return load_recipe(ROOT / "recipes/demo-cpu.yaml", [*settings, *more])


def test_groups_that_teach_nothing_fill_up_where_they_were_drawn(rollouts: Any) -> None:
    """`+` a group whose rewards differ, `-` one whose do not: all of the former, the first of the latter, as made."""
    batches = ["-+--", "--+-", "++++"]
    asked: list[int] = []

    def answer_prompts(version: int, batch: int, sampling: Sampling, _: Any) -> list[list[Sample]]:
        assert (version, sampling) == (3, Sampling(0.7))
        asked.append(batch)
        groups = enumerate(batches[batch - 7])
        return [[sample(f"{batch - 7}{i}", n * (kind == "+"))] for i, kind in groups for n in (0, 1)]

    rollouts._answer_prompts = answer_prompts
    batch = rollouts.generate_batch(version=3, batch=7, recipe=recipe_of(1))
    assert [one.prompt for one in batch.samples[::2]] == ["00", "01", "02", "12"]
    assert [one.prompt for one in batch.samples[1::2]] == ["00", "01", "02", "12"]
    assert (batch.batches, batch.zero_variance_groups, asked) == (2, 6, [7, 8])
    batch = rollouts.generate_batch(version=3, batch=7, recipe=recipe_of(5))
    assert [one.prompt for one in batch.samples[::2]] == ["01", "12", "20", "21"]
    batch = rollouts.generate_batch(version=3, batch=7, recipe=recipe_of(0))
    assert [one.prompt for one in batch.samples[::2]] == ["00", "01", "02", "03"]


def test_branches_of_an_answer_stay_together(rollouts: Any) -> None:
    """They count as one answer in groups, in rewards and in what the batch is filled up to."""

    def branches(prompt: str, reward: float, count: int) -> list[Sample]:
        return [replace(sample(prompt, reward), branch=branch) for branch in range(count)]

    work = [
        branches(f"{i}", float(i % 2), 1 + (i == 2) * 2) for i in range(8)
    ]  # the first answer of prompt 1 has three
    found = Answers([one for answer in work for one in answer])
    assert answers_of(found.samples) == work
    assert answer_numbers(found.samples) == [0, 1, 2, 2, 2, 3, 4, 5, 6, 7]
    rollouts._replicas = SimpleNamespace(numbers=(0,), advance=lambda *arguments, apart: {0: found})
    rollouts.train = SimpleNamespace(batch=lambda *arguments: [None] * 4)
    batch = rollouts.generate_batch(version=0, batch=0, recipe=recipe_of(0))
    assert batch.samples == found.samples
    assert batch.zero_variance_groups == 0
    agents = replace(recipe_of(0).rollout, agents=Agents())
    metrics = batch.metrics(batch.samples, agents, 0)
    assert metrics["reward/mean"] == 0.5
    assert metrics["rollout/branches_mean"] == 10 / 8
    filled = filled_up(batch.samples, 8)
    assert filled[:10] == batch.samples
    assert [(one.branch, one.num_loss_tokens, len(one.logprobs)) for one in filled[10:]] == [(NO_BRANCH, 0, 0)] * 6
    assert answer_numbers(filled) == [*answer_numbers(batch.samples), *[NO_ANSWER] * 6]
    assert filled_up(batch.samples, 5) == batch.samples


def test_token_of_an_answer_takes_nine_bytes() -> None:
    """In memory, where each of its Python objects would take dozens, and where it is sent."""
    count = 10_000
    tokens = AnswerTokens(tokens=[7] * count, loss_mask=[True] * count, logprobs=[-0.5] * count, versions=[3] * count)
    found = tokens.sample(Example(0, "", "", (1,)), (1,), "")
    assert found.tokens.nbytes + found.loss_mask.nbytes + found.logprobs.nbytes == 9 * count
    assert found.versions.runs == ((3, count),)
    assert len(pickle.dumps(found)) < 9.1 * count


def test_rows_that_fill_a_batch_are_spread_over_its_minibatches() -> None:
    assert spread_over(2, samples=8, rows=8) == [*range(8)]
    order = spread_over(4, samples=17, rows=32)
    assert sorted(order) == [*range(32)]
    for first in range(0, 32, 8):
        assert sum(row < 17 for row in order[first : first + 8]) in (4, 5)


def test_held_out_answers(rollouts: Any) -> None:
    """Full reward is 1, and what fails is told."""
    rewards = [sample("", reward) for reward in (1.0, 1.1, 0.5, 0.0)]
    answers = {
        0: Answers(rewards[:2], {"timeout": 1}, {"timeout": "first"}),
        1: Answers(rewards[2:], {"timeout": 2}, {"timeout": "second"}),
    }
    rollouts.held_out = {"eval": SimpleNamespace(examples=(Example(0, "", "", ()),) * 4)}
    rollouts._replicas = SimpleNamespace(numbers=(0, 1), advance=lambda *arguments, apart: answers)
    found = rollouts.evaluate(0, recipe_of(0))
    assert (found.accuracy, found.metrics["eval/reward"]) == (0.25, pytest.approx(0.65))
    assert (found.failures, found.examples) == ({"timeout": 3}, {"timeout": "first"})


def test_work_of_lost_replicas_is_done_by_the_others(rollouts: Any) -> None:
    """Samples are in the order of the prompts, and those of a prompt are from one replica."""
    asked: list[dict[int, list[str]]] = []

    class Losing:
        """Three replicas, two of which are lost one after the other."""

        numbers: tuple[int, ...] = (0, 3, 5)

        def advance(
            self, shares: Any, wanted: Any, version: int, sampling: Sampling, apart: bool
        ) -> dict[int, Answers]:
            assert (wanted, apart) == (None, True)
            work = {number: [p.example for p in share for _ in p.seeds] for number, share in shares.items()}
            asked.append(work)
            self.numbers, lost = (*self.numbers[:1], *self.numbers[2:]), self.numbers[1:2]
            return {n: Answers([sample(e, 1.0) for e in examples]) for n, examples in work.items() if n not in lost}

    rollouts._replicas = Losing()
    rollouts.train = SimpleNamespace(batch=lambda batch, prompts: ["a", "b", "c", "d"])
    batch = rollouts.generate_batch(0, 0, recipe_of(0))
    assert [one.prompt for one in batch.samples] == ["a", "a", "b", "b", "c", "c", "d", "d"]
    assert asked == [
        {0: ["a"] * 2, 3: ["b"] * 2, 5: ["c", "c", "d", "d"]},
        {0: [], 5: ["b"] * 2},
        {0: ["b"] * 2},
    ]
    rollouts._replicas.numbers = ()
    with pytest.raises(NoReplicas):
        rollouts.generate_batch(0, 0, recipe_of(0))


def test_reward_model_leaves_reward_by_name_to_held_out_answers(rollouts: Any) -> None:
    """Its references in the training data may be of any kind, and are not judged by."""
    asked: list[str] = []
    held = Sample("", (1,), (2,), (True,), (-0.5,), "", 0.0, versions=(6,), reference="right")
    versions: list[int] = []

    class Apart:
        def advance(
            self, prompts: Any, wanted: Any, version: int, sampling: Sampling, stop: Any, gives: bool
        ) -> Answers:
            versions.append(version)
            assert (wanted, sampling, stop, gives) == (None, Sampling(0.7), None, True)
            return Answers([held for prompt in prompts for _ in prompt.seeds])

        def release(self, version: int) -> None: ...

    def score(queries: list[Query]) -> Scores:
        asked.extend(query.reference for query in queries)
        return Scores([1.0] * len(queries))

    replicas: Any = object.__new__(EngineReplicas)
    replicas._holder, replicas._exchange = None, SimpleNamespace(gather=lambda replica, value: {replica: value})
    replicas._engine = SimpleNamespace(replica=0, replicas=1, leads=True)
    replicas._scorer = SimpleNamespace(score=score)
    replicas._apart = replicas._partial = Apart()
    rollouts._replicas, by_function = replicas, ReplicaScorer(replicas)
    rollouts._scorers = Scorers(by_function, by_function)
    rollouts.train = SimpleNamespace(batch=lambda batch, prompts: [None] * prompts)
    rollouts.held_out = {"eval": SimpleNamespace(examples=[Example(0, "", "", ())])}
    batch = rollouts.generate_batch(3, 0, recipe_of(0))
    assert [(one.reward, one.weight_version) for one in batch.samples] == [(1.0, 6)] * 8
    assert asked == ["right"] * 8
    rollouts._scorers = Scorers(None, by_function)
    rollouts._recipe = replace(rollouts._recipe, reward=replace(rollouts._recipe.reward, model="judge"))
    batch = rollouts.generate_batch(4, 0, recipe_of(0))
    assert ([one.reward for one in batch.samples], batch.zero_variance_groups) == ([0.0] * 8, 0)
    assert len(asked) == 8
    assert rollouts.evaluate(5, recipe_of(0)).accuracy == 1.0
    assert len(asked) == 9
    assert versions == [3, 4, 5]
