"""Which branches of an agent's session are truncated: those that the run's limits cut, not those that the agent did."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from hybrid3d.config import load_recipe
from hybrid3d.generation.agents.history import Call, PromptTokens, RefusedCall
from hybrid3d.generation.agents.session import Session, samples_of
from hybrid3d.generation.agents.sessions import SessionPool
from hybrid3d.generation.engine import Completion, Sampling
from hybrid3d.rl.data import Example
from run_ranks import ROOT

END = 0


class Tokenizer(SimpleNamespace):
    """Can be kept by what it is, as tokenizers can."""

    __hash__ = object.__hash__


TOKENIZER: Any = Tokenizer(
    decode=lambda tokens, **_: "".join(chr(96 + token) for token in tokens if token),
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
