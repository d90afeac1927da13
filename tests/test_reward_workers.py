"""Ranks that only compute rewards, without engines: who scores what, and what is done about lost ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from commands import ROOT
from fake_ranks import FakeRank, make_store
from hybrid3d.config import load_recipe
from hybrid3d.generation.replicas import Advanced, Answers, ScoredReplicas
from hybrid3d.generation.samples import Sample
from hybrid3d.scoring.scorer import Scores
from hybrid3d.workers import role_client
from hybrid3d.workers.channel import Call, Register, Reply
from hybrid3d.workers.reward import RewardWorkers
from hybrid3d.workers.roles import OtherRoles

pytestmark = pytest.mark.engines

# Two ranks that train and generate, and two groups of two ranks that have a reward model
RECIPE = load_recipe(
    ROOT / "recipes/demo-cpu.yaml",
    [
        "train.pp=1",
        "roles.reward.ranks=4",
        "roles.reward.tp=2",
        "reward.model=scorer",
        "algorithm.samples_per_prompt=2",
    ],
)


class RewardRank(FakeRank):
    """A rank that computes rewards: the length of the answer, and 10 more by model; until it is killed."""

    def __init__(self, rank: int, store: dist.Store, failure: str = ""):
        self.scored = list[list[str]]()
        self.dies_at_next_call = False
        super().__init__(store, Register(rank, failure))

    def dies_at(self, call: Call) -> bool:
        return self.dies_at_next_call

    def reply(self, call: Call) -> Reply:
        assert call.method == "score"
        answers = [sample.answer for sample in call.arguments["samples"]]
        self.scored.append(answers)
        rewards = [len(answer) + 10.0 * call.arguments["by_model"] for answer in answers]
        failures = {"hung": answers.count("xxx")} if "xxx" in answers else {}
        begin = time.time()
        leads = self.rank % 2 == 0
        scores = Scores(rewards, failures, dict.fromkeys(failures, f"on rank {self.rank}")) if leads else None
        return Reply(scores, [("reward", begin, begin + 1)])


def sample(answer: str) -> Sample:
    return Sample("", (1,), (2,), (True,), (-0.5,), answer, 0.0, versions=(0,))


def rewards_of(answers: dict[int, Answers]) -> dict[int, list[float]]:
    return {number: [sample.reward for sample in found.samples] for number, found in answers.items()}


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    return make_store(monkeypatch, ranks=6)


@pytest.fixture
def events() -> list[tuple[str, Any]]:
    return []


@pytest.fixture
def workers(
    store: dist.Store,
    events: list[tuple[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[RewardWorkers]:
    """Ranks 2 and 3, and ranks 4 and 5."""
    monkeypatch.setattr(role_client, "CLOSE_SECONDS", 0.5)

    def event(name: str, message: str = "", **fields: Any) -> None:
        events.append((name, fields.get("ranks")))

    roles = OtherRoles(RECIPE, store, SimpleNamespace(event=event), 0)  # type: ignore[arg-type]
    assert roles.engines is None
    assert roles.reward_workers is not None
    yield roles.reward_workers
    roles.close()


SAMPLES = [sample(answer) for answer in ("a", "bb", "xxx", "xxx", "dddd", "eeeee")]
REWARDS = [1, 2, 3, 3, 4, 5]


def test_each_group_scores_the_answers_to_its_prompts(workers: RewardWorkers, store: dist.Store) -> None:
    ranks = {rank: RewardRank(rank, store) for rank in range(2, 6)}
    found = workers.score(SAMPLES, by_model=False)
    assert found == Scores(REWARDS, {"hung": 2}, {"hung": "on rank 4"})
    assert [ranks[rank].scored for rank in (2, 3)] == [[["a", "bb"]]] * 2
    assert [ranks[rank].scored for rank in (4, 5)] == [[["xxx", "xxx", "dddd", "eeeee"]]] * 2
    assert workers.score(SAMPLES, by_model=True).rewards == [11, 12, 13, 13, 14, 15]
    assert workers.score([], by_model=False) == Scores([])
    assert workers.lap_busy_seconds() == pytest.approx(2.0, abs=0.1)


def test_a_call_asks_for_no_more_than_the_time_limit_of_a_batch_allows(
    workers: RewardWorkers, store: dist.Store
) -> None:
    ranks = {rank: RewardRank(rank, store) for rank in range(2, 6)}
    samples = SAMPLES * 40
    assert workers.score(samples, by_model=False).rewards == REWARDS * 40
    # In 420 s, 28 times 10 s and 5 s to end a worker, by two workers, and whole prompts
    assert [len(call) for call in ranks[2].scored] == [len(call) for call in ranks[4].scored] == [56, 56, 8]


def test_the_others_score_what_a_lost_group_had_to(
    workers: RewardWorkers,
    store: dist.Store,
    events: list[tuple[str, Any]],
) -> None:
    ranks = {rank: RewardRank(rank, store) for rank in range(2, 6)}
    workers.score(SAMPLES, by_model=False)
    ranks[5].dies_at_next_call = True
    assert workers.score(SAMPLES, by_model=False).rewards == REWARDS
    assert ranks[2].scored[1:] == [["a", "bb"], ["xxx", "xxx", "dddd", "eeeee"]]
    assert events == [("reward_worker_lost", [4, 5])]
    ranks[2].dies_at_next_call = True
    with ThreadPoolExecutor(1) as pool:  # with none left, it waits
        waiting = pool.submit(workers.score, SAMPLES, False)
        while events[-1] != ("no_reward_worker", None):
            time.sleep(0.01)
        assert not waiting.done()
        again = [RewardRank(rank, store, failure="killed") for rank in (4, 5)]
        assert waiting.result(timeout=10).rewards == REWARDS
    assert again[0].scored == [["a", "bb", "xxx", "xxx", "dddd", "eeeee"]]
    assert events[1:] == [("reward_worker_lost", [2, 3]), ("no_reward_worker", None), ("reward_worker_joined", [4, 5])]


def test_other_ranks_score_what_replicas_answer() -> None:
    asked: list[tuple[Any, ...]] = []
    answered = {3: Answers(SAMPLES[:4], {"environment_hung": 1}), 7: Answers(SAMPLES[4:])}

    class Replicas:
        numbers = (3, 7)

        def answer(self, *arguments: Any) -> dict[int, Answers]:
            asked.append(arguments)
            return answered

        def advance(self, *arguments: Any) -> dict[int, Advanced]:
            asked.append(arguments)
            return {number: Advanced(answers, [(0, number)], number) for number, answers in answered.items()}

    def score(samples: Any, by_model: bool) -> Scores:
        return Scores([len(one.answer) + 10.0 * by_model for one in samples], {"hung": 2}, {"hung": "two"})

    scored: Any = ScoredReplicas(Replicas(), score)
    assert scored.numbers == (3, 7)
    found = scored.answer({}, 5, 0.5, scored=False)
    assert rewards_of(found) == {3: [11, 12, 13, 13], 7: [14, 15]}
    assert (found[3].failures, found[7].failures) == ({"environment_hung": 1, "hung": 2}, {})
    assert found[3].examples == {"hung": "two"}
    assert [replace(one, reward=0.0) for one in found[3].samples] == SAMPLES[:4]
    advanced = scored.advance({}, None, 5, 0.5, scored=True)
    assert rewards_of({number: one.answers for number, one in advanced.items()}) == {3: REWARDS[:4], 7: REWARDS[4:]}
    kept = {number: (one.unfinished, one.dropped_tokens) for number, one in advanced.items()}
    assert kept == {3: ([(0, 3)], 3), 7: ([(0, 7)], 7)}
    assert asked == [({}, 5, 0.5, False), ({}, None, 5, 0.5, False, None)]
