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
from hybrid3d.scoring.scorer import Given, Query, Scores
from hybrid3d.workers import role_client
from hybrid3d.workers.loop import WorkerServer
from hybrid3d.workers.messages import Call, Register, Reply, Score
from hybrid3d.workers.reward import RewardWorkers, WorkerScorer

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
        self.scored, self.tokens = list[list[str]](), list[Any]()
        self.dies_at_next_call = False
        super().__init__(store, Register(rank, failure))

    def dies_at(self, call: Call) -> bool:
        return self.dies_at_next_call

    def reply(self, call: Call) -> Reply:
        assert isinstance(call, Score)
        queries = call.shares[0].whole()
        answers = [query.answer for query in queries]
        self.scored.append(answers)
        self.tokens += [query.tokens for query in queries]
        rewards = [len(answer) + 10.0 * (call.scorer == "model") for answer in answers]
        failures = {"hung": answers.count("xxx")} if "xxx" in answers else {}
        begin = time.time()
        leads = self.rank % 2 == 0
        scores = Scores(rewards, failures, dict.fromkeys(failures, f"on rank {self.rank}"))
        return Reply(scores={0: scores} if leads else {}, spans=[("reward", begin, begin + 1)])


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

    roles = WorkerServer(RECIPE, store, SimpleNamespace(event=event), 0)  # type: ignore[arg-type]
    assert roles.engines is None
    assert roles.reward_workers is not None
    yield roles.reward_workers
    roles.close()


ANSWERS = ("a", "bb", "xxx", "xxx", "dddd", "eeeee")
QUERIES = [Query(answer, "", "", tokens=(1,), prompt_number=i // 2) for i, answer in enumerate(ANSWERS)]
REWARDS = [1, 2, 3, 3, 4, 5]


def test_reward_groups_score_the_answers_to_their_prompts(workers: RewardWorkers, store: dist.Store) -> None:
    ranks = {rank: RewardRank(rank, store) for rank in range(2, 6)}
    found = workers.score(QUERIES, "function")
    assert found == Scores(REWARDS, {"hung": 2}, {"hung": "on rank 4"})
    assert [ranks[rank].scored for rank in (2, 3)] == [[["a", "bb"]]] * 2
    assert [ranks[rank].scored for rank in (4, 5)] == [[["xxx", "xxx", "dddd", "eeeee"]]] * 2
    assert workers.score(QUERIES, "model").rewards == [11, 12, 13, 13, 14, 15]
    assert workers.score([], "function") == Scores([])
    assert workers.lap_busy_seconds() == pytest.approx(2.0, abs=0.1)


def test_scoring_call_takes_no_longer_than_its_limit(workers: RewardWorkers, store: dist.Store) -> None:
    ranks = {rank: RewardRank(rank, store) for rank in range(2, 6)}
    many = [replace(query, prompt_number=i // 2) for i, query in enumerate(QUERIES * 40)]
    assert workers.score(many, "function").rewards == REWARDS * 40
    # In 420 s, 28 times 10 s and 5 s to end a worker, by two workers, and whole prompts
    assert [len(call) for call in ranks[2].scored] == [len(call) for call in ranks[4].scored] == [56, 56, 8]


def test_reward_groups_score_what_a_lost_group_had_to(
    workers: RewardWorkers,
    store: dist.Store,
    events: list[tuple[str, Any]],
) -> None:
    ranks = {rank: RewardRank(rank, store) for rank in range(2, 6)}
    workers.score(QUERIES, "function")
    ranks[5].dies_at_next_call = True
    assert workers.score(QUERIES, "function").rewards == REWARDS
    assert ranks[2].scored[1:] == [["a", "bb"], ["xxx", "xxx", "dddd", "eeeee"]]
    assert events == [("reward_worker_lost", [4, 5])]
    ranks[2].dies_at_next_call = True
    with ThreadPoolExecutor(1) as pool:  # with none left, it waits
        waiting = pool.submit(workers.score, QUERIES, "function")
        while events[-1] != ("no_reward_worker", None):
            time.sleep(0.01)
        assert not waiting.done()
        again = [RewardRank(rank, store, failure="killed") for rank in (4, 5)]
        assert waiting.result(timeout=10).rewards == REWARDS
    assert again[0].scored == [["a", "bb", "xxx", "xxx", "dddd", "eeeee"]]
    assert events[1:] == [("reward_worker_lost", [2, 3]), ("no_reward_worker", None), ("reward_worker_joined", [4, 5])]


def test_busy_seconds_have_all_calls_of_a_step(workers: RewardWorkers, store: dist.Store) -> None:
    for rank in range(2, 6):
        RewardRank(rank, store)
    for _ in range(150):
        workers.score(QUERIES[:4], "function")  # a prompt for each group
    assert workers.lap_busy_seconds() == pytest.approx(150.0, abs=1.0)
    time.sleep(1.1)  # a span lasts for a second
    assert workers.lap_busy_seconds() > 0.0
    assert workers.lap_busy_seconds() == 0.0
    workers.score(QUERIES[:4], "function")
    assert sum(map(len, workers._spans.values())) < 600  # those of steps before are dropped
    assert workers.lap_busy_seconds() == pytest.approx(1.0, abs=0.1)


def test_functions_get_texts_alone(workers: RewardWorkers, store: dist.Store) -> None:
    ranks = {rank: RewardRank(rank, store) for rank in range(2, 6)}
    by_model = Given(WorkerScorer(workers, "model"))
    assert by_model.score([*QUERIES[:2], replace(QUERIES[2], given=0.25), *QUERIES[4:]]).rewards == [
        11,
        12,
        0.25,
        14,
        15,
    ]
    assert [len(tokens) for tokens in ranks[2].tokens + ranks[4].tokens] == [1] * 4
    assert WorkerScorer(workers, "function").score(QUERIES).rewards == REWARDS
    assert [len(tokens) for tokens in ranks[2].tokens[2:] + ranks[4].tokens[2:]] == [0] * 6


@pytest.mark.parametrize(("most", "calls"), [(4, [8, 8]), (14, [8, 8]), (16, [16])])
def test_call_has_whole_prompts_and_at_least_one(
    workers: RewardWorkers, store: dist.Store, most: int, calls: list[int]
) -> None:
    """Of four prompts with eight answers each, two groups score equally many."""
    ranks = {rank: RewardRank(rank, store) for rank in range(2, 6)}
    workers._most = most
    queries = [replace(QUERIES[0], prompt_number=i // 8) for i in range(32)]
    assert workers.score(queries, "function").rewards == [1.0] * 32
    assert [len(call) for call in ranks[2].scored] == [len(call) for call in ranks[4].scored] == calls
