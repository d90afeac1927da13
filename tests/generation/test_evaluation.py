"""What an evaluation measures: against closed formulas, against all subsets, and what of it is refused."""

from __future__ import annotations

import itertools
import random
from fractions import Fraction
from math import comb
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from commands import HELD_OUT
from hybrid3d.config import Recipe, RecipeError, load_recipe, recipe_to_yaml
from hybrid3d.generation.engine import Sampling
from hybrid3d.generation.evaluation import HeldOutAnswer, format_result, majority, measure, pass_at_k
from hybrid3d.generation.rollouts import Rollouts
from hybrid3d.generation.samples import Sample
from hybrid3d.generation.scheduler import Answers
from hybrid3d.rl.data import Example
from hybrid3d.scoring.functions import FINAL_ANSWERS, REWARDS
from hybrid3d.scoring.scorer import Given, Scorers, Scores
from run_ranks import ROOT

DEMO = ROOT / "recipes/demo-cpu.yaml"
SAMPLED = ["evaluation.samples=4", "evaluation.temperature=0.7"]


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_is_share_of_subsets_with_right_answer(n: int) -> None:
    for right, k in itertools.product(range(n + 1), range(1, n + 1)):
        answers = [True] * right + [False] * (n - right)
        subsets = [*itertools.combinations(answers, k)]
        assert len(subsets) == comb(n, k)
        assert pass_at_k(n, right, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-15)


def test_pass_at_k_is_the_products_closed_form() -> None:
    """The form in which the paper computes it: 1 - prod(1 - k / i) over i from n - c + 1 to n."""
    rng = random.Random(1)
    for _ in range(300):
        n = rng.randint(1, 300)
        right, k = rng.randint(0, n), rng.randint(1, n)
        product = Fraction(1)
        for i in range(n - right + 1, n + 1):
            product *= 1 - Fraction(k, i) if n - right >= k else 0
        assert pass_at_k(n, right, k) == pytest.approx(float(1 - product), abs=1e-12)


def test_pass_at_k_has_no_bias() -> None:
    """Its expectation over n answers, each right with probability p, is the probability 1 - (1 - p)^k."""
    n, p = 6, 0.3
    for k in range(1, n + 1):
        chances = [comb(n, right) * p**right * (1 - p) ** (n - right) for right in range(n + 1)]
        expected = sum(chance * pass_at_k(n, right, k) for right, chance in enumerate(chances))
        assert expected == pytest.approx(1 - (1 - p) ** k, abs=1e-12)


@pytest.mark.parametrize(
    ("finals", "rewards", "expected"),
    [
        ("aab", (1, 1, 0), 1.0),
        ("abb", (1, 0, 0), 0.0),
        ("ab", (1, 0), 0.5),  # equally common: the mean of a choice at random
        ("aabbc", (1, 1, 0, 0, 0), 0.5),
        ("   b", (1, 1, 1, 0), 0.0),  # the others do not vote
        ("   ", (1, 1, 1), 0.0),
    ],
)
def test_majority_votes_with_final_answers(finals: str, rewards: tuple[int, ...], expected: float) -> None:
    answers = [
        HeldOutAnswer(float(reward), final.strip() or None) for final, reward in zip(finals, rewards, strict=True)
    ]
    assert majority(answers) == expected
    assert majority(answers[::-1]) == expected


def test_final_answers_are_those_that_rewards_compare() -> None:
    assert FINAL_ANSWERS.keys() < REWARDS.keys()
    number, formula = FINAL_ANSWERS["gsm8k"], FINAL_ANSWERS["math"]
    assert number("So #### 1,234.0 shells") == number("#### $1234.") != number("#### 1234.5")
    assert number("1234") is number("#### many") is None
    assert formula(r"so \boxed{\frac{1}{2} }") == formula(r"#### \frac{1}{2}") == r"\frac{1}{2}"
    assert formula("one half") is formula(r"\boxed{}") is None


def test_measure_gives_one_answer_its_usual_metrics() -> None:
    found = measure([[HeldOutAnswer(reward)] for reward in (1.0, 1.1, 0.5, 0.0)], (), votes=True)
    assert found == {"accuracy": 0.25, "reward": pytest.approx(0.65)}


NOTHING_TO_SCORE: Any = SimpleNamespace(score=lambda queries: Scores([0.0 for _ in queries]))
GIVEN = Scorers(None, Given(NOTHING_TO_SCORE))


def recipe_of(*overrides: str) -> Recipe:
    return load_recipe(DEMO, overrides)


def test_evaluation_of_two_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers to a problem are from one replica, each with a seed of its own, which is the same at every step."""
    recipe = recipe_of(*SAMPLED, "evaluation.top_p=0.9", "evaluation.k=[1,2]", "evaluation.data.hard=hard.parquet")
    asked: list[list[tuple[Example, int]]] = []

    def advance(shares: Any, wanted: Any, version: int, sampling: Sampling, apart: bool) -> dict[int, Answers]:
        assert (wanted, sampling, apart) == (None, Sampling(0.7, top_p=0.9), True)
        work = {n: [(prompt.example, seed) for prompt in share for seed in prompt.seeds] for n, share in shares.items()}
        asked.append([one for share in work.values() for one in share])
        assert all(len(share) % 4 == 0 for share in work.values())
        return {n: Answers([to(*one, place) for place, one in enumerate(share)]) for n, share in work.items()}

    def to(example: Example, seed: int, place: int) -> Sample:
        right = example.prompt == "easy" or (example.row == 0 and place % 4 == 3)
        text = "#### 7" if right else f"#### {place % 2}"
        return Sample("", (1,), (2,), (True,), (-0.5,), text, float(right), versions=(0,), scored=True)

    files = {name: [Example(row, name, "7", (1,)) for row in range(3)] for name in ("easy", "hard")}
    held_out: Any = {key: SimpleNamespace(examples=files[name]) for key, name in (("eval", "easy"), ("hard", "hard"))}
    rollouts = Rollouts(recipe, SimpleNamespace(numbers=(0, 1), advance=advance), GIVEN, None, held_out)  # type: ignore[arg-type]
    result = rollouts.evaluate(0, recipe)
    assert result.metrics == {
        "eval/accuracy": 1.0,
        "eval/reward": 1.0,
        "eval/mean@4": 1.0,
        "eval/pass@1": 1.0,
        "eval/pass@2": 1.0,
        "eval/majority@4": 1.0,
        "eval/hard/accuracy": pytest.approx(1 / 12),
        "eval/hard/reward": pytest.approx(1 / 12),
        "eval/hard/mean@4": pytest.approx(1 / 12),
        "eval/hard/pass@1": pytest.approx(1 / 12),
        "eval/hard/pass@2": pytest.approx((1 / 2) / 3),
        "eval/hard/majority@4": 0.0,
    }
    seeds = [seed for of_file in asked for _, seed in of_file]
    assert len(set(seeds)) == 24
    again = rollouts.evaluate(5, recipe)
    assert again == result
    assert [seed for of_file in asked[2:] for _, seed in of_file] == seeds
    lines = [*format_result(result, 5, as_json=False)]
    assert lines[0] == "step 5: held-out accuracy 1.0000 of 3 problems"
    assert "eval/hard/pass@2 0.1667" in lines


def test_greedy_answers_have_no_seeds() -> None:
    recipe, asked = recipe_of("rollout.stop=['x']"), list[Any]()

    def advance(shares: Any, wanted: Any, version: int, sampling: Sampling, apart: bool) -> dict[int, Answers]:
        asked.extend([sampling.stop, *((prompt.example, *prompt.seeds) for prompt in shares[0])])
        return {0: Answers([Sample("", (1,), (2,), (True,), (), "", 1.0, versions=(0,), scored=True)])}

    example = Example(0, "example", "", ())
    held_out: Any = {"eval": SimpleNamespace(examples=[example])}
    rollouts = Rollouts(recipe, SimpleNamespace(numbers=(0,), advance=advance), GIVEN, None, held_out)  # type: ignore[arg-type]
    assert rollouts.evaluate(0, recipe).metrics == {"eval/accuracy": 1.0, "eval/reward": 1.0}
    assert asked == [("x",), (example, None)]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["evaluation.samples=4"],
            "evaluation.samples=4: with evaluation.temperature=0 all answers to a problem are the same: set",
        ),
        (
            [*SAMPLED, "evaluation.k=[1,8]"],
            "evaluation.k: pass@8 needs at least 8 answers per problem, and",
        ),
        ([*SAMPLED, "evaluation.k=[2,2]"], "evaluation.k: expected a list without repetitions, each an integer"),
        ([*SAMPLED, "evaluation.k=[0]"], "evaluation.k: expected an integer, 1 to 10,000, got 0"),
        ([*SAMPLED, "evaluation.top_p=0"], "evaluation.top_p: expected a number, more than 0 and at most 1, got 0"),
        (["evaluation.temperature=0.001"], "evaluation.temperature: expected a number, 0 or 0.01 to 100, because vLLM"),
        (["evaluation.temperatur=1"], "evaluation.temperatur: unknown key, did you mean temperature?"),
        (
            ["evaluation.top_p=0.9"],
            "evaluation.top_p=0.9 has no effect: with evaluation.temperature=0",
        ),
        (["evaluation.k=[1]"], "evaluation.k=[1] has no effect: with evaluation.samples=1 there is no pass@k"),
        (["evaluation.data.a b=x"], "evaluation.data.a b: expected a name of letters, digits and _ - only"),
        (["evaluation.data.reward=x"], "evaluation.data.reward: reward is a name that metrics have: choose another"),
        (["evaluation.data=[x]"], "evaluation.data: expected a section of at most 100 names, got ['x'] (a list)"),
        (["evaluation.data.a="], "evaluation.data.a: expected a string, not empty, of printable characters"),
        (
            ["evaluation.data.a=build/demo/eval.parquet"],
            "evaluation.data.a=build/demo/eval.parquet is the file of data.eval too: leave one of them out",
        ),
        (["evaluation.data={a: x, b: x}"], "evaluation.data.b=x is the file of evaluation.data.a too"),
        (["rollout.top_p=1.5"], "rollout.top_p: expected a number, more than 0 and at most 1, got 1.5"),
        (["rollout.top_k=-2"], "rollout.top_k: expected an integer, -1 to 16,777,216, got -2"),
        (["rollout.min_p=1.1"], "rollout.min_p: expected a number, 0 to 1, got 1.1"),
        (["rollout.stop=x"], "rollout.stop: expected a list without repetitions, each a string"),
        (["rollout.stop=['']"], "rollout.stop: expected a string, of 1 to 1,000 characters, got ''"),
    ],
)
def test_evaluation_refuses_invalid_settings(overrides: list[str], said: str) -> None:
    with pytest.raises(RecipeError) as refused:
        recipe_of(*overrides)
    assert [problem[: len(said)] for problem in refused.value.problems] == [said]


def test_file_that_is_not_there_is_refused_before_ranks_start(demo: Path) -> None:
    from hybrid3d.inputs.models import read_config, read_data, read_tokenizer
    from hybrid3d.rl.data import DataError

    files = [f"model.path={demo}/base", f"data.train={demo}/train.parquet", f"data.eval={demo}/eval.parquet"]
    recipe = recipe_of(*files, f"evaluation.data.more={demo}/warmup.parquet")
    _, held_out = read_data(recipe, read_config(recipe.model.path), read_tokenizer(recipe))
    assert {name: len(data.examples) for name, data in held_out.items()} == {"eval": HELD_OUT, "more": 8192}
    recipe = recipe_of(*files, "evaluation.data.more=nowhere.parquet")
    with pytest.raises(DataError, match=r"nowhere\.parquet"):
        read_data(recipe, read_config(recipe.model.path), read_tokenizer(recipe))


def test_resolved_recipe_is_read_again(tmp_path: Path) -> None:
    recipe = recipe_of(
        *SAMPLED,
        "evaluation.k=[1,4]",
        "evaluation.data={aime-24: a.parquet, more: b.parquet}",
        'rollout.stop=["\\n\\n", "</answer>"]',
        "rollout.top_k=20",
        "schedule={5: {evaluation.samples: 8, rollout.top_p: 0.9}}",
    )
    assert recipe.rollout is not None
    assert recipe.rollout.stop == ("\n\n", "</answer>")
    assert recipe.rollout.truncations == {"top_k": 20}
    (tmp_path / "again.yaml").write_text(recipe_to_yaml(recipe))
    assert load_recipe(tmp_path / "again.yaml") == recipe
