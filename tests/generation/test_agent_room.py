"""Which branches of an agent's session are truncated: those that the run's limits cut, not those that the agent did."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from hybrid3d.config import Async, load_recipe
from hybrid3d.generation.agents.answers import AgentAnswers, samples_of
from hybrid3d.generation.agents.history import Call, NoSession, PromptTokens, RefusedCall
from hybrid3d.generation.agents.sessions import Session, SessionPool
from hybrid3d.generation.engine import Completion, Sampling
from hybrid3d.generation.scheduler import News, Prompt, Prompts
from hybrid3d.rl.data import Example
from run_ranks import ROOT

END = 0


class Tokenizer(SimpleNamespace):
    """Can be kept by what it is, as tokenizers can."""

    __hash__ = object.__hash__


TOKENIZER: Any = Tokenizer(
    decode=lambda tokens, **_: "".join(chr(96 + token) for token in tokens if token),
    encode=lambda text, **_: [],
    eos_token_id=END,
    get_vocab=lambda: {chr(96 + token): token for token in range(1, 27)},
)


class Agent:
    """An agent that has a session, and the engine that answers it with what it is told."""

    def __init__(self, longest: int, context: int):
        limits = [f"rollout.max_new_tokens={longest}", f"rollout.max_model_len={context}"]
        recipe = load_recipe(ROOT / "recipes/demo-cpu.yaml", ["rollout.agents={}", *limits])
        self.pool = SessionPool(TOKENIZER, recipe.rollout, [END])
        self.session = self.pool.open(Example(0, "", "", (1,)), 5, 0)
        self.pool.serve([self.session], Sampling())
        assert self.pool.take().result(0) is self.session

    def call(self, prompt: Sequence[int], reply: Sequence[int], most: int | None = None) -> str:
        """Return the finish reason."""
        result = self.pool.begin(self.session.id, Call(PromptTokens(tuple(prompt)), most))
        ((number, request),) = self.pool.follow({}, is_idle=False).requests.items()
        tokens = tuple(reply[: request.max_new_tokens])
        logprobs, truncated = (-1.0,) * len(tokens), tokens[-1] != END  # vLLM looks at the end token first
        self.pool.follow({number: Completion(tokens, logprobs, 0, truncated=truncated)}, is_idle=False)
        return result.result(0).finish_reason

    def truncated(self) -> list[bool]:
        session: Session = self.session
        return [sample.truncated for sample in samples_of(session, TOKENIZER, 0.0)]


def test_answer_that_ends_with_its_last_token_is_complete() -> None:
    agent = Agent(longest=4, context=64)
    assert agent.call([1, 2], [3, 4, 5, END]) == "stop"
    assert agent.truncated() == [False]


@pytest.mark.parametrize(("longest", "context"), [(4, 64), (60, 6)])
def test_limit_of_the_run_cuts_an_answer(longest: int, context: int) -> None:
    agent = Agent(longest, context)
    assert agent.call([1, 2], [3, 4, 5, 6, 7]) == "length"
    assert agent.truncated() == [True]


def test_agent_asking_for_few_tokens_is_not_truncated() -> None:
    agent = Agent(longest=4, context=64)
    assert agent.call([1, 2], [3, 4, 5, 6], most=1) == "length"
    assert agent.truncated() == [False]
    assert agent.call([1, 2, 3, 9], [4, END]) == "stop"
    assert agent.truncated() == [False]


def test_conversation_without_room_for_another_reply_is_truncated() -> None:
    agent = Agent(longest=6, context=64)
    assert agent.call([1, 2], [3, END]) == "stop"
    assert agent.truncated() == [False]
    with pytest.raises(RefusedCall, match="leaves no room"):
        agent.call([1, 2, 3, END, 7, 7, 7, 7], [4, END])
    assert agent.truncated() == [True]
    assert agent.call([1, 2, 9], [5, END]) == "stop"  # another branch, and this one is complete
    assert agent.truncated() == [True, False]


class Waiting(Agent):
    """An agent whose call is being answered."""

    def __init__(self) -> None:
        super().__init__(longest=9, context=64)
        self.result = self.pool.begin(self.session.id, Call(PromptTokens((1, 2)), 5))
        ((self.number, self.request),) = self.pool.follow({}, is_idle=False).requests.items()

    def serve(self) -> News:
        return self.pool.serve([self.session], Sampling())


def part(*tokens: int, version: int = 0) -> Completion:
    return Completion(tokens, (-1.0,) * len(tokens), version)


def test_call_goes_on_after_an_interruption_with_what_it_has() -> None:
    agent = Waiting()
    assert agent.pool.halt({}, {agent.number: part(3, 4)}, kept=False) == []
    ((number, request),) = agent.serve().requests.items()
    assert (number != agent.number, request.prompt_ids, request.max_new_tokens) == (True, (1, 2, 3, 4), 3)
    agent.pool.follow({number: part(5, END, version=1)}, is_idle=False)
    assert agent.result.result(0).tokens == (3, 4, 5, END)
    (sample,) = samples_of(agent.session, TOKENIZER, 0.0)
    assert (tuple(sample.tokens), tuple(sample.versions)) == ((3, 4, 5, END), (0, 0, 1, 1))


def test_call_that_keeps_its_cache_is_not_begun_again() -> None:
    agent = Waiting()
    assert agent.pool.halt({}, {agent.number: part(3, 4)}, kept=True) == []
    assert not agent.serve().requests
    agent.pool.follow({agent.number: part(5, END, version=1)}, is_idle=False)
    assert agent.result.result(0).tokens == (3, 4, 5, END)


def test_call_whose_part_has_ended_is_answered() -> None:
    """As where a stop is complete with the last token before an interruption; a kept request is then cancelled."""
    for kept in (False, True):
        agent = Waiting()
        assert agent.pool.halt({}, {agent.number: part(3, END)}, kept) == [agent.number] * kept
        assert agent.result.result(0).text == "c"
        assert not agent.serve().requests


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("gives_up", [False, True])
def test_agent_that_leaves_while_the_engine_rests(kept: bool, gives_up: bool) -> None:
    """It gives its call up, or ends its session: the engine drops the request once, if it has it."""
    agent = Waiting()
    agent.pool.halt({}, {agent.number: part(3)}, kept)
    if gives_up:
        agent.pool.abandon(agent.session.id, agent.result)
    else:
        agent.pool.end(agent.session.id, 1.0)
    news = agent.serve()
    assert (news.requests, news.cancelled) == ({}, [agent.number] * kept)
    assert agent.session.done != gives_up
    assert agent.session.generated == 0  # nobody waits for what was generated


def test_calls_begin_again_where_the_engine_was_emptied() -> None:
    agent = Waiting()
    agent.pool.halt({}, {agent.number: part(3)}, kept=True)
    agent.pool.release()
    ((number, request),) = agent.serve().requests.items()
    assert (number != agent.number, request.prompt_ids) == (True, (1, 2, 3))


@pytest.mark.parametrize(("partial", "restarts"), [("continue", False), ("restart", True)])
def test_sessions_restart_before_others_are_served_by_newer_weights(partial: Any, restarts: bool) -> None:
    """As for an evaluation: calls of unfinished sessions are answered beside it."""
    agent = Waiting()
    answers: Any = object.__new__(AgentAnswers)
    answers._pool, answers._program = agent.pool, None
    prompts = Prompts(answers, Async(partial=partial, max_staleness=2))
    prompts.begin([Prompt((0, 0), agent.session.example, (5,), 0)], 1, 0, Sampling(), None)
    session = agent.pool.take().result(0)
    result = agent.pool.begin(session.id, Call(PromptTokens((1, 2)), 5))
    (number,) = prompts.follow({}, is_idle=False).requests
    prompts.end({}, {number: part(3)}, gives=False)
    prompts.release(1)
    assert session.done == restarts
    assert (number in agent.pool._running, result.done()) == (False, restarts)
    in_its_place = agent.pool.take()
    assert in_its_place.done() == restarts
    if restarts:
        assert (in_its_place.result(0).seed, in_its_place.result(0).version) == (5, 0)
    assert prompts.answers().dropped_tokens == restarts


@pytest.mark.parametrize("kept", [False, True])
def test_session_that_is_dropped_is_gone_for_its_agent(kept: bool) -> None:
    agent = Waiting()
    agent.pool.halt({}, {agent.number: part(3)}, kept)
    assert agent.pool.drop(agent.session) == [agent.number] * kept
    assert isinstance(agent.result.exception(0), NoSession)
    another = agent.pool.open(agent.session.example, agent.session.seed, 1)
    news = agent.pool.serve([another], Sampling())
    assert (news.requests, news.cancelled) == ({}, [])
    assert agent.pool.take().result(0) is another


def test_agents_are_not_silent_while_the_engine_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    agent = Agent(longest=9, context=64)
    agent.call([1, 2], [3, END])
    timeout = agent.pool._timeout
    for resting in (0.9, 5.0):
        now[0] += resting * timeout
        agent.pool.halt({}, {}, kept=False)
        now[0] += 10 * timeout
        agent.pool.serve([agent.session], Sampling())
        agent.pool.follow({}, is_idle=False)
        assert agent.session.failure == ("" if resting < 1 else "hung")
