"""The sessions of agents: a server's thread takes, uses and ends them, and the engine's thread answers their calls.

A session ends as samples that share a reward.
"""

from __future__ import annotations

import copy
import itertools
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from hybrid3d.config import Rollout
from hybrid3d.generation.agents.history import (
    Branch,
    Call,
    CallResult,
    History,
    NoSession,
    RefusedCall,
    RunEnded,
    no_room,
)
from hybrid3d.generation.agents.limits import check_length
from hybrid3d.generation.engine import Completion, GenerationRequest, Sampling
from hybrid3d.generation.samples import AnswerTokens, Sample
from hybrid3d.generation.stops import Stops, find_stops, pause_tokens
from hybrid3d.generation.turns import seed_of_request
from hybrid3d.rl.data import Example
from hybrid3d.rl.token_texts import decode_part

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.05  # while no call is being answered
CHECK_SECONDS = 1.0  # between two searches for sessions without an agent
REMIND_SECONDS = 60.0  # between two messages that sessions wait for agents
MAX_OFFERS = 3  # of a session whose agents have not made a call
PLANS = 3  # of a call, if others change its session's history meanwhile


@dataclass(eq=False)
class _Pending:
    """A call that is being answered.

    Attributes:
        start: the number of its branch's tokens before it.
        max_new_tokens: how many tokens it may generate.
        stops: that end the reply; at `pause_tokens` the engine pauses, as one may end there.
    """

    call: Call
    branch: Branch
    start: int
    max_new_tokens: int
    stops: Stops
    pause_tokens: frozenset[int]
    result: Future[CallResult] = field(default_factory=Future)

    @property
    def generated(self) -> int:
        return len(self.branch.tokens) - self.start


@dataclass(eq=False)
class Session:
    """An answer that an agent makes.

    Attributes:
        seed: of its first request; None is greedy.
        id: which its agent knows, and nobody else; empty while nobody has it.
        version: of the weights when it was opened.
        sampling: how its calls are answered.
        calls: those that are being answered, by the number of their request.
        requests: how many the engine has been given for it.
        active: when its agent was heard of last.
        reward: which its agent has given; None: the recipe's reward is computed.
        failure: the kind of failure that ended it; empty if there was none. `message` says more.
    """

    example: Example
    seed: int | None
    version: int
    sampling: Sampling
    history: History
    id: str = ""
    offers: int = 0
    calls: dict[int, _Pending] = field(default_factory=dict)
    requests: int = 0
    active: float = 0.0
    ended: bool = False
    reward: float | None = None
    failure: str = ""
    message: str = ""


@dataclass(frozen=True)
class Exchange:
    """What follows a step of the engine; the leading rank of a replica sends it to the others.

    Attributes:
        requests: new ones by number.
        cancelled: the numbers of those that nobody waits for any more.
        done: all sessions have ended.
    """

    requests: Mapping[int, GenerationRequest]
    cancelled: Sequence[int]
    done: bool


class SessionPool:
    """The sessions of a replica's current share of work. Any thread may call any method."""

    def __init__(self, tokenizer: Any, rollout: Rollout, end_tokens: Sequence[int]):
        assert rollout.agents is not None, "the recipe has agents"
        self._tokenizer, self._rollout, self._end_tokens = tokenizer, rollout, frozenset(end_tokens)
        self._reader = copy.deepcopy(tokenizer)  # of prompts, in the server's thread; a tokenizer is for one thread
        self._timeout = rollout.agents.timeout_seconds
        self._changed = threading.Condition()
        self._sessions: list[Session] = []
        self._by_id: dict[str, Session] = {}
        self._free: deque[Session] = deque()
        self._waiting: deque[Future[Session]] = deque()
        self._numbers = itertools.count()
        self._new: dict[int, GenerationRequest] = {}
        self._running: dict[int, Session] = {}
        self._cancelled: list[int] = []
        self._closed = False
        self._checked = self._reminded = 0.0
        self._longest = max(map(len, tokenizer.get_vocab()))  # characters of a token
        self._find_stops = lru_cache(maxsize=64)(lambda stops: find_stops(self._reader, stops))
        self._pause_tokens = lru_cache(maxsize=64)(lambda stops: pause_tokens(self._reader, stops))

    def open(self, work: Sequence[tuple[Example, int | None]], version: int, sampling: Sampling) -> list[Session]:
        """Offer sessions to agents, one for each example and seed."""
        with self._changed:
            self._sessions = [
                Session(example, seed, version, sampling, History(self._reader, self._tokenizer))
                for example, seed in work
            ]
            self._by_id, self._free = {}, deque(self._sessions)
            self._reminded = time.monotonic()
            self._offer()
            return self._sessions

    def close(self) -> None:
        """Tell agents that wait for sessions that there are no more."""
        with self._changed:
            self._closed = True
            for waiting in self._waiting:
                if waiting.set_running_or_notify_cancel():
                    waiting.set_exception(RunEnded())
            self._waiting.clear()

    # --- for agents ---------------------------------------------------------------------------------------------------

    def take(self) -> Future[Session]:
        """Return a session when there is one; its agent has it alone. Cancel the future to give up waiting.

        The future raises RunEnded when there are no more.
        """
        taken: Future[Session] = Future()
        with self._changed:
            if self._closed:
                taken.set_exception(RunEnded())
            else:
                self._waiting.append(taken)
                self._offer()
        return taken

    def give_back(self, session_id: str) -> None:
        """Offer a session again whose agent has gone before it got it: as if nobody had taken it."""
        with self._changed:
            session = self._by_id.get(session_id)
            if session is not None and not session.requests:
                del self._by_id[session.id]
                session.id, session.offers = "", session.offers - 1
                self._free.appendleft(session)
                self._offer()

    def find(self, session_id: str) -> Session:
        """Return the session of an agent.

        Raises:
            NoSession: there is no such session.
        """
        with self._changed:
            if session_id not in self._by_id:
                raise NoSession
            return self._by_id[session_id]

    def begin(self, session_id: str, call: Call) -> Future[CallResult]:
        """Begin a call of a session. `abandon` ends it, and so does the end of the session, with NoSession.

        Raises:
            NoSession: there is no such session.
            RefusedCall: the prompt leaves no room for a reply, or has no tokens.
            NoChatTemplate: as `History.render`.
        """
        session = self.find(session_id)
        check_length(call, self._rollout, self._longest)
        try:  # what takes long is done before the engine's thread is kept waiting
            stops = self._stops_of(call)
            pause_at = self._pause_tokens(stops)
        except ValueError as error:
            raise RefusedCall(str(error), "invalid_value", "stop") from None
        for _ in range(PLANS):
            plan = session.history.plan(call.prompt)
            if plan.changes == session.history.changes:
                break
        with self._changed:
            session = self.find(session_id)
            branch = session.history.begin(call.prompt, plan)
            context, start = len(branch.context), len(branch.tokens)
            room = self._room(branch)
            if room < 1 or not context:
                session.history.drop(branch)
                branch.truncated = True  # if it has turns: the agent would have gone on with it
                raise no_room(context, start, self._rollout, call.is_chat)
            pending = _Pending(call, branch, start, min(room, call.max_tokens or room), stops, pause_at)
            self._submit(session, pending)
            session.active = time.monotonic()
            self._changed.notify_all()
            return pending.result

    def abandon(self, session_id: str, result: Future[CallResult]) -> None:
        """End a call whose agent has gone: its tokens are dropped."""
        with self._changed:
            session = self._by_id.get(session_id)
            if session is None:
                return
            for number, pending in [*session.calls.items()]:
                if pending.result is result:
                    self._drop(session, number)

    def end(self, session_id: str, reward: float | None) -> None:
        """End a session, and all calls of it.

        Raises:
            NoSession: there is no such session.
        """
        with self._changed:
            session = self.find(session_id)
            session.reward = reward
            self._end(session)
            self._changed.notify_all()

    # --- for the thread that generates --------------------------------------------------------------------------------

    def exchange(self, ended: Mapping[int, Completion], is_idle: bool) -> Exchange:
        """Give the completions that have ended to the agents; return what the engine does next.

        Args:
            is_idle: the engine has no requests; then this waits a moment for some.
        """
        with self._changed:
            for number, completion in ended.items():
                if number in self._running:  # otherwise nobody waits for it any more
                    self._answer(self._running.pop(number), number, completion)
            now = time.monotonic()
            if now - self._checked > CHECK_SECONDS:
                self._checked = now
                self._end_silent_sessions(now)
            done = all(session.ended for session in self._sessions)
            if is_idle and not (self._new or done):
                self._changed.wait(POLL_SECONDS)
            new, self._new = self._new, {}
            cancelled, self._cancelled = self._cancelled, []
            return Exchange(new, [number for number in cancelled if number not in ended], done and not new)

    def _answer(self, session: Session, number: int, completion: Completion) -> None:
        pending = session.calls.pop(number)
        branch, call = pending.branch, pending.call
        branch.append_generated(completion)
        tokens = tuple(branch.tokens[pending.start :])
        context = branch.context
        text = decode_part(self._tokenizer, tokens, context[: len(context) - len(tokens)])
        stops = pending.stops
        found = [(text.find(stop), stop) for stop in stops.texts if stop in text]
        ended = tokens[-1] in self._end_tokens | stops.ids or bool(found)
        if stops.texts and not ended and pending.generated < pending.max_new_tokens:
            self._submit(session, pending)  # the engine has paused at a token that may end a stop
            return
        reply = text
        if found:
            at, stop = min(found)
            reply = text[: at + len(stop)] if call.include_stop else text[:at]
        branch.truncated = not ended and self._room(branch) < 1  # not where the agent asked for no more tokens
        session.history.finish(branch, call.prompt, reply, cut=reply != text)
        session.active = time.monotonic()
        count = len(tokens)
        logprobs = tuple(branch.logprobs[-count:]) if branch.logprobs else ()
        reason = "stop" if ended else "length"
        prompt_ids = (*branch.prompt_ids, *branch.tokens[: pending.start])
        pending.result.set_result(CallResult(prompt_ids, tokens, logprobs, reply, reason))

    def _submit(self, session: Session, pending: _Pending) -> None:
        number, branch = next(self._numbers), pending.branch
        self._new[number] = GenerationRequest(
            prompt_ids=branch.context,
            max_new_tokens=pending.max_new_tokens - pending.generated,
            stop_tokens=sorted(self._end_tokens | pending.pause_tokens),
            seed=seed_of_request(session.seed, session.requests),
            sampling=replace(session.sampling, stop=()),  # which is looked for in the text of all of a call's requests
        )
        session.requests += 1
        session.calls[number] = pending
        self._running[number] = session

    def _room(self, branch: Branch) -> int:
        """Return how many tokens may follow those of a branch."""
        rollout = self._rollout
        return min(rollout.max_model_len - len(branch.context), rollout.max_new_tokens - len(branch.tokens))

    def _stops_of(self, call: Call) -> Stops:
        """Return what ends the reply to a call: its own stops, and those of the recipe."""
        return self._find_stops(tuple(dict.fromkeys((*call.stops, *self._rollout.stop))))

    def _offer(self) -> None:
        """Give sessions that nobody has to agents that wait."""
        while self._free and self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.set_running_or_notify_cancel():
                continue
            session = self._free.popleft()
            session.id = secrets.token_urlsafe(16)
            session.offers += 1
            session.active = time.monotonic()
            self._by_id[session.id] = session
            waiting.set_result(session)

    def _end(self, session: Session) -> None:
        for number in [*session.calls]:
            self._drop(session, number)
        self._by_id.pop(session.id, None)
        session.ended = True
        if not session.history.branches and not session.failure:
            session.failure, session.message = "no_calls", "a session ended without a call that was answered"

    def _drop(self, session: Session, number: int) -> None:
        pending = session.calls.pop(number)
        session.history.drop(pending.branch)
        del self._running[number]
        if self._new.pop(number, None) is None:
            self._cancelled.append(number)
        if not pending.result.done():
            pending.result.set_exception(NoSession())

    def _end_silent_sessions(self, now: float) -> None:
        for session in [*self._by_id.values()]:
            if session.calls or now - session.active < self._timeout:
                continue
            if not session.history.branches and session.offers < MAX_OFFERS:
                del self._by_id[session.id]
                self._free.append(session)
                continue
            if session.history.branches:
                session.failure = "hung"
                session.message = f"its agent made no call for {self._timeout:g} s"
            self._end(session)
        self._offer()
        if self._free and not self._by_id and now - self._reminded > REMIND_SECONDS:
            self._reminded = now
            logger.warning("%d sessions wait for agents", len(self._free))


def samples_of(session: Session, tokenizer: Any, default: float) -> list[Sample]:
    """Return a sample for each branch of a session that has ended, with the reward if its agent has given one.

    A session without a call has one that training learns nothing from.

    Args:
        default: the reward of a session that has failed.
    """
    example, history = session.example, session.history
    reward = default if session.failure else session.reward
    if not history.branches:
        nothing = AnswerTokens(tokens=[tokenizer.eos_token_id], loss_mask=[False], versions=[session.version])
        return [nothing.sample(example, example.prompt_ids, "", reward)]
    return [
        branch.sample(
            example,
            branch.prompt_ids,
            decode_part(tokenizer, branch.tokens, branch.prompt_ids),
            reward,
            branch=number,
            last=branch is history.last,
        )
        for number, branch in enumerate(history.branches)
    ]
