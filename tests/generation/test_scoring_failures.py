"""Rewards that end their process, return something other than rewards, or fail one and all."""

from __future__ import annotations

import re
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hybrid3d.config import load_recipe
from hybrid3d.generation.rollouts import FailedRewards, Rollouts
from hybrid3d.generation.samples import Sample
from hybrid3d.generation.scheduler import Answers
from hybrid3d.rl.data import Example
from hybrid3d.scoring.scorer import FunctionScorer, Scorers, Scores
from queries import score

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 20.0  # seconds that a reward has, of which one that is gone must not cost any

MINE = """\
import collections, ctypes, os, signal, sys, threading
import numpy

def in_thread(function, *arguments):
    thread = threading.Thread(target=function, args=arguments)
    thread.start()
    thread.join()

def leaving(answer, reference, prompt):
    match answer:
        case "os._exit(0)": os._exit(0)
        case "exit(0) in C": ctypes.CDLL(None).exit(0)
        case "os._exit(0) in a thread": in_thread(os._exit, 0)
        case "os._exit(3)": os._exit(3)
        case "abort": os.abort()
        case "SIGKILL": os.kill(os.getpid(), signal.SIGKILL)
        case "sys.exit()": sys.exit()
        case "sys.exit(0)": sys.exit(0)
        case "sys.exit() in a thread": in_thread(sys.exit)
    return 1.0

def returning(answers, references, prompts):
    import array
    n = len(answers)
    match answers[0]:
        case "list": return [0.5] * n
        case "tuple": return (0.5,) * n
        case "array": return numpy.full(n, 0.5)
        case "float32": return numpy.full(n, 0.5, dtype="float32")
        case "tensor":
            import torch
            return torch.full((n,), 0.5, dtype=torch.bfloat16, requires_grad=True)
        case "column":
            return numpy.full((n, 1), 0.5)
        case "scalar": return numpy.float64(0.5)
        case "dict": return dict.fromkeys(range(n), 0.5)
        case "defaultdict": return collections.defaultdict(float, {0: 0.5, 1: 0.5})
        case "set": return {0.5, 1.5}
        case "str": return "10"
        case "bytes": return bytes(n)
        case "generator": return (0.5 for _ in answers)
        case "number": return 0.5
        case "None": return None
        case "nested": return [[0.5]] * n
        case "hostile":
            class Hostile:
                def __getattr__(self, name): raise KeyError(name)
            return Hostile()

returning.batched = True
"""


@pytest.fixture(autouse=True)
def _mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)


def test_reward_that_ends_its_process_is_told_at_once() -> None:
    """Whatever its exit code; the other rewards of the batch are as they would be."""
    exits = {
        "os._exit(0)": "0",
        "exit(0) in C": "0",
        "os._exit(0) in a thread": "0",
        "os._exit(3)": "3",
        "abort": "-6",
        "SIGKILL": "-9",
    }
    with closing(FunctionScorer("mine:leaving", workers=2, timeout_seconds=LIMIT, default=-1.0)) as scorer:
        score(scorer, [("", "", "")])
        for answer, code in exits.items():
            begin = time.monotonic()
            scores = score(scorer, [("first", "", ""), (answer, "", ""), ("last", "", "")])
            assert time.monotonic() - begin < LIMIT / 2, answer
            message = f"the worker ended with exit code {code}"
            assert scores == Scores([1.0, -1.0, 1.0], {"died": 1}, {"died": message}), answer
        for answer in ("sys.exit()", "sys.exit(0)"):
            scores = score(scorer, [("first", "", ""), (answer, "", "")])
            assert (scores.rewards, scores.failures) == ([1.0, -1.0], {"raised": 1})
            assert scores.examples["raised"].startswith("SystemExit")
        assert score(scorer, [("sys.exit() in a thread", "", "")]).rewards == [1.0]  # which ends that thread alone


@pytest.mark.parametrize("kind", ["list", "tuple", "array", "float32", "tensor"])
def test_batched_rewards_as_a_sequence(kind: str) -> None:
    with closing(FunctionScorer("mine:returning", workers=1, timeout_seconds=60.0, default=-1.0)) as scorer:
        assert score(scorer, [(kind, "", "")] * 2) == Scores([0.5, 0.5], {}, {})


def test_batched_rewards_that_are_no_sequence() -> None:
    """The keys of a dict and the characters of a text are no rewards, though they may be numbers."""
    said = {
        "dict": "{0: 0.5, 1: 0.5} (dict)",
        "defaultdict": "defaultdict(<class 'float'>, {0: 0.5, 1: 0.5}) (defaultdict)",
        "set": "{0.5, 1.5} (set)",
        "str": "'10' (str)",
        "bytes": r"b'\x00\x00' (bytes)",
        "column": "array([[0.5], [0.5]]) (ndarray)",
        "scalar": "np.float64(0.5) (float64)",
        "number": "0.5 (float)",
        "None": "None (NoneType)",
    }
    with closing(FunctionScorer("mine:returning", workers=1, timeout_seconds=LIMIT, default=-1.0)) as scorer:
        for kind, shown in said.items():
            scores = score(scorer, [(kind, "", "")] * 2)
            assert (scores.rewards, scores.failures) == ([-1.0, -1.0], {"wrong_type": 2}), kind
            assert scores.examples["wrong_type"] == f"{shown}: expected a list, a tuple or a 1-D array of numbers"
        assert score(scorer, [("generator", "", "")] * 2).failures == {"wrong_type": 2}
        assert score(scorer, [("nested", "", "")] * 2).failures == {"not_a_number": 2}
        assert score(scorer, [("hostile", "", "")] * 2).failures == {"raised": 2}


# ---- where all fail


def sample(reward: float) -> Sample:
    return Sample("", (1,), (2,), (True,), (-0.5,), "", reward, versions=(0,))


@pytest.fixture
def rollouts() -> Any:
    """Without an engine: 4 prompts, 2 answers to each."""
    settings = ["algorithm.prompts_per_step=4", "algorithm.samples_per_prompt=2", "train.micro_batch_size=4"]
    recipe, replicas = load_recipe(ROOT / "recipes/demo-cpu.yaml", settings), SimpleNamespace(numbers=(0,))
    held_out: Any = SimpleNamespace(examples=(Example(0, "", "", ()),) * 8)
    return Rollouts(recipe, replicas, Scorers(None, None), held_out, {"eval": held_out})  # type: ignore[arg-type]


def fail(rollouts: Any, failures: dict[str, int]) -> None:
    """Let conversations and rewards of the next answers fail."""
    examples = {kind: f"an example of {kind}" for kind in failures}
    talks = {kind: count for kind, count in failures.items() if kind.startswith("environment")}
    rewards = {kind: count for kind, count in failures.items() if kind not in talks}
    answers = Answers([sample(0.0)] * 8, talks, {kind: examples[kind] for kind in talks})
    scores = Scores([0.0] * 8, rewards, {kind: examples[kind] for kind in rewards})
    rollouts._replicas.advance = lambda shares, wanted, version, sampling, apart: {0: answers}
    scorer: Any = SimpleNamespace(score=lambda queries: scores)
    rollouts._scorers = Scorers(scorer, scorer)


def of_step(rollouts: Any, **failures: int) -> None:
    fail(rollouts, failures)
    rollouts.train = SimpleNamespace(batch=lambda number, prompts: [None] * prompts)
    rollouts.generate_batch(version=0, batch=0, recipe=rollouts._recipe)


def of_held_out(rollouts: Any, **failures: int) -> None:
    fail(rollouts, failures)
    rollouts.evaluate(0, rollouts._recipe)


@pytest.mark.parametrize("failures", [{}, {"raised": 7}, {"raised": 3, "environment_hung": 7}])
def test_run_goes_on_where_one_reward_has_not_failed(rollouts: Any, failures: dict[str, int]) -> None:
    of_step(rollouts, **failures)
    of_held_out(rollouts, **failures)


@pytest.mark.parametrize(
    "failures",
    [{"raised": 8}, {"raised": 5, "died": 3}, {"environment_raised": 8}, {"raised": 8, "environment_hung": 2}],
)
def test_run_ends_where_all_rewards_or_all_conversations_failed(rollouts: Any, failures: dict[str, int]) -> None:
    for what, where in ((of_step, ""), (of_held_out, " on held-out problems")):
        with pytest.raises(FailedRewards) as caught:
            what(rollouts, **failures)
        kinds = ", ".join(f"{count} {kind} (an example of {kind})" for kind, count in sorted(failures.items()))
        assert str(caught.value) == (
            f"{sum(failures.values())} of 8 rewards failed{where}: {kinds}; when all fail the run ends, whatever "
            "reward.max_failures allows: fix gsm8k, or raise reward.timeout_seconds"
        )
        assert caught.value.raised_on_all_ranks


def test_share_that_a_recipe_allows(rollouts: Any) -> None:
    rollouts._recipe = replace(rollouts._recipe, reward=replace(rollouts._recipe.reward, max_failures=0.25))
    of_step(rollouts, raised=2)
    with pytest.raises(FailedRewards, match=re.escape("3 of 8 rewards failed: 3 raised")) as caught:
        of_step(rollouts, raised=3)
    assert "reward.max_failures=0.25 allows 2: fix gsm8k" in str(caught.value)
    of_held_out(rollouts, raised=7)  # the share is of a step's samples
