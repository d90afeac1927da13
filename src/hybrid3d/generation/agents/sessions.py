"""The sessions of agents: a server's thread takes, uses and ends them, and the engine's thread answers their calls.

A session is an answer that an agent makes. It ends as samples that share a reward.
"""

from __future__ import annotations

import copy
import itertools
import logging
import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

from hybrid3d.config import Rollout
from hybrid3d.generation.agents.history import Branch, Call, CallResult, History, NoSession, RefusedCall, RunEnded
from hybrid3d.generation.engine import Completion, GenerationRequest, Sampling
from hybrid3d.generation.scheduler import News
from hybrid3d.generation.stops import Stops, find_stops, pause_tokens
from hybrid3d.generation.turns import seed_of_request
from hybrid3d.rl.data import Example
from hybrid3d.rl.token_texts import TokenTexts, decode_part

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.05  # while no call is being answered
CHECK_SECONDS = 1.0  # between two searches for sessions without an agent
REMIND_SECONDS = 60.0  # between two messages that sessions wait for agents
MAX_OFFERS = 3  # of a session whose agents have not made a call
PLANS = 3  # of a call, if others change its session's history meanwhile


@dataclass(eq=False)
class Pending:
    """A call that is being answered.

    Attributes:
        start: the number of its branch's tokens before it.
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
        version: of the weights when its prompt was drawn.
        calls: those that are being answered, by the number of their request.
        requests: how many the engine has been given for it.
        active: when its agent was heard of last, by the pool's clock.
        reward: which its agent has given; None: the recipe's reward is computed.
        failure: the kind of failure that ended it; empty if there was none. `message` says more.
    """

    example: Example
    seed: int | None
    version: int
    history: History
    id: str = ""
    offers: int = 0
    sampling: Sampling = field(default_factory=Sampling)
    calls: dict[int, Pending] = field(default_factory=dict)
    requests: int = 0
    active: float = 0.0
    done: bool = False
    reward: float | None = None
    failure: str = ""
    message: str = ""

    @property
    def generated(self) -> int:
        """How many tokens the policy has generated."""
        return sum(branch.generated for branch in self.history.branches)

    @property
    def newest_version(self) -> int:
        """The version of the weights that generated last."""
        newest = [version for branch in [*self.history.branches] for version in branch.versions[-1:]]
        return max(newest, default=self.version)  # an agent may have given up its only call meanwhile


class SessionPool:
    """The sessions of a replica. Any thread may call any method."""

    def __init__(self, tokenizer: Any, rollout: Rollout, end_tokens: Sequence[int]):
        assert rollout.agents is not None, "the recipe has agents"
        self._tokenizer, self._rollout, self._end_tokens = tokenizer, rollout, frozenset(end_tokens)
        self._reader = copy.deepcopy(tokenizer)  # of prompts, in the server's thread; a tokenizer is for one thread
        self._timeout = rollout.agents.timeout_seconds
        self._changed = threading.Condition()
        self._awaited: Sequence[Session] = ()
        self._served_seconds, self._since = 0.0, math.inf  # until the engine was stopped last; when it began again
        self._by_id: dict[str, Session] = {}
        self._free: deque[Session] = deque()
        self._waiting: deque[Future[Session]] = deque()
        self._numbers = itertools.count()
        self._new: dict[int, Pending] = {}  # that the engine does not have yet
        self._running: dict[int, Session] = {}
        self._cancelled: list[int] = []
        self._closed = False
        self._checked = self._reminded = 0.0
        self._longest = max(map(len, tokenizer.get_vocab()))  # characters of a token
        self._find_stops = lru_cache(maxsize=64)(partial(find_stops, self._reader))
        self._pause_tokens = lru_cache(maxsize=64)(partial(pause_tokens, TokenTexts(self._reader)))

    def close(self) -> None:
        """Tell agents that wait for sessions, or for a reply, that there are no more."""
        with self._changed:
            self._closed = True
            for session in [*self._by_id.values()]:
                self._end(session)
            for waiting in self._waiting:
                if waiting.set_running_or_notify_cancel():
                    waiting.set_exception(RunEnded())
            self._waiting.clear()

    # --- for agents ---------------------------------------------------------------------------------------------------

    def take(self) -> Future[Session]:
        """Return a session when there is one, which its agent has alone. Cancel the future to give up waiting.

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
            if session is not None and not (session.requests or session.calls):
                del self._by_id[session.id]
                session.id, session.offers = "", session.offers - 1
                self._free.appendleft(session)
                self._offer()

    def find(self, session_id: str) -> Session:
        """Return the session of an agent. NoSession: there is no such session."""
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
        call.check_length(self._rollout, self._longest)
        try:  # what takes long is done before the engine's thread is kept waiting
            stops = self._find_stops(tuple(dict.fromkeys((*call.stops, *self._rollout.stop))))
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
                raise call.without_room(context, start, self._rollout)
            pending = Pending(call, branch, start, min(room, call.max_tokens or room), stops, pause_at)
            self._submit(session, pending)
            session.active = self._clock()
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
        """End a session, and all calls of it. NoSession: there is no such session."""
        with self._changed:
            session = self.find(session_id)
            session.reward = reward
            self._end(session)
            self._changed.notify_all()

    # --- for the thread that generates --------------------------------------------------------------------------------

    def open(self, example: Example, seed: int | None, version: int) -> Session:
        """Return a session that agents are offered when calls are answered."""
        with self._changed:
            self._free.append(Session(example, seed, version, History(self._reader, self._tokenizer)))
            return self._free[-1]

    def serve(self, sessions: Sequence[Session], sampling: Sampling) -> News:
        """Answer all calls until `halt`, and return what the engine does first. The end of `sessions` is awaited.

        The calls of other sessions are answered too: an agent that waits for a reply could not take one of `sessions`.
        """
        with self._changed:
            self._since = self._reminded = time.monotonic()
            self._awaited = sessions
            for session in sessions:
                session.sampling = sampling
            self._offer()
            return self._news(())

    def follow(self, ended: Mapping[int, Completion], is_idle: bool) -> News:
        """Give the completions that have ended to the agents; return what the engine does next.

        Where the engine has no requests, this waits a moment for some.
        """
        with self._changed:
            self._answer_all(ended)
            now = time.monotonic()
            if now - self._checked > CHECK_SECONDS:
                self._checked = now
                self._end_silent_sessions(now)
            if is_idle and not (self._new or all(session.done for session in self._awaited)):
                self._changed.wait(POLL_SECONDS)
            return self._news(ended)

    def halt(self, ended: Mapping[int, Completion], parts: Mapping[int, Completion], kept: bool) -> list[int]:
        """Implements `Continuation.interrupt`. Agents wait for the rest meanwhile, and their time does not count."""
        with self._changed:
            self._answer_all(ended)
            self._answer_all({number: part for number, part in parts.items() if part.tokens}, are_parts=True)
            self._served_seconds, self._since = self._clock(), math.inf
            self._cancelled = []
            if not kept:
                self._submit_again()
            return [number for number in parts if number not in self._running] if kept else []

    def release(self) -> None:
        """Implements `Continuation.release`."""
        with self._changed:
            self._cancelled = []
            self._submit_again()

    def drop(self, session: Session) -> list[int]:
        """End a session whose answer nobody waits for; return the numbers of its requests that the engine has."""
        with self._changed:
            numbers = [number for number in session.calls if number not in self._new]
            if session in self._free:
                self._free.remove(session)
            self._end(session)
            self._cancelled = [number for number in self._cancelled if number not in numbers]
            return numbers

    def _news(self, ended: Collection[int]) -> News:
        new, self._new = self._new, {}
        cancelled, self._cancelled = self._cancelled, []
        requests = {number: self._request(self._running[number], pending) for number, pending in new.items()}
        return News(requests, [number for number in cancelled if number not in ended])

    def _submit_again(self) -> None:
        """Begin requests again that the engine has no more, after what it has generated of them."""
        for number in sorted(self._running.keys() - self._new.keys()):
            session = self._running.pop(number)
            self._submit(session, session.calls.pop(number))

    def _answer_all(self, completions: Mapping[int, Completion], are_parts: bool = False) -> None:
        for number, completion in completions.items():
            if number in self._running:  # otherwise nobody waits for it any more
                self._answer(self._running[number], number, completion, are_parts)

    def _answer(self, session: Session, number: int, completion: Completion, is_part: bool) -> None:
        pending = session.calls[number]
        branch, call = pending.branch, pending.call
        branch.append_generated(completion)
        tokens = tuple(branch.tokens[pending.start :])
        before = (*branch.prompt_ids, *branch.tokens[: pending.start])
        text = decode_part(self._tokenizer, tokens, before)
        stops = pending.stops
        found = [(text.find(stop), stop) for stop in stops.texts if stop in text]
        ended = tokens[-1] in self._end_tokens | stops.ids or bool(found)
        if is_part and not ended:
            return
        del session.calls[number], self._running[number]
        if stops.texts and not ended and pending.generated < pending.max_new_tokens:
            self._submit(session, pending)  # the engine has paused at a token that may end a stop
            return
        reply = text
        if found:
            at, stop = min(found)
            reply = text[: at + len(stop)] if call.include_stop else text[:at]
        branch.truncated = not ended and self._room(branch) < 1  # not where the agent asked for no more tokens
        session.history.finish(branch, call.prompt, reply, cut=reply != text)
        session.active = self._clock()
        logprobs = tuple(branch.logprobs[-len(tokens) :]) if branch.logprobs else ()
        reason = "stop" if ended else "length"
        pending.result.set_result(CallResult(before, tokens, logprobs, reply, reason))

    def _submit(self, session: Session, pending: Pending) -> None:
        number = next(self._numbers)
        self._new[number] = session.calls[number] = pending
        self._running[number] = session

    def _request(self, session: Session, pending: Pending) -> GenerationRequest:
        session.requests += 1
        return GenerationRequest(
            prompt_ids=pending.branch.context,
            max_new_tokens=pending.max_new_tokens - pending.generated,
            stop_tokens=sorted(self._end_tokens | pending.pause_tokens),
            seed=seed_of_request(session.seed, session.requests - 1),
            sampling=replace(session.sampling, stop=()),  # which is looked for in the text of all of a call's requests
        )

    def _room(self, branch: Branch) -> int:  # for tokens that follow those of a branch
        rollout = self._rollout
        return min(rollout.max_model_len - len(branch.context), rollout.max_new_tokens - len(branch.tokens))

    def _clock(self) -> float:
        """Return for how long calls were answered until now: agents are not silent while they wait for the engine."""
        return self._served_seconds + max(0.0, time.monotonic() - self._since)

    def _offer(self) -> None:
        while self._free and self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.set_running_or_notify_cancel():
                continue
            session = self._free.popleft()
            session.id = secrets.token_urlsafe(16)
            session.offers += 1
            session.active = self._clock()
            self._by_id[session.id] = session
            waiting.set_result(session)

    def _end(self, session: Session) -> None:
        for number in [*session.calls]:
            self._drop(session, number)
        self._by_id.pop(session.id, None)
        if not session.history.branches and not session.failure:
            session.failure, session.message = "no_calls", "a session ended without a call that was answered"
        session.done = True  # last, as the engine's thread reads it

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
            if session.calls or self._clock() - session.active < self._timeout:
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
