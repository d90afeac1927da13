"""Answers that consist of turns of the policy and replies of an environment."""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist

from hybrid3d.config import Recipe
from hybrid3d.distributed import broadcast_object
from hybrid3d.generation.engine import Completion, Engine, GenerationRequest, Sampling
from hybrid3d.generation.samples import AnswerTokens
from hybrid3d.generation.stops import Stops, find_stops, pause_tokens
from hybrid3d.rl.data import Example
from hybrid3d.rl.token_texts import decode_part, encode_part
from hybrid3d.scoring.environments import (
    ConversationItem,
    EnvironmentRunner,
    Reply,
    check_environment,
    completed,
    ends_with_stop,
)


@dataclass
class Trajectory(AnswerTokens):
    """An answer that is being generated, with the replies of an environment.

    Attributes:
        seed: of the first request; None samples greedily.
        turns: texts of the policy and of the environment, alternating, without the policy's current turn.
        turn_start: index in `tokens` of the policy's current turn.
        requests: how many the engine has completed for this answer.
        stopped: whether a stop of `rollout.stop` has ended it.
        done: whether it is complete.
        failure: the kind of the environment's failure that ended it; empty if there was none.
        message: what the failure said.
    """

    example: Example
    seed: int | None
    turns: list[str] = field(default_factory=list)
    turn_start: int = 0
    requests: int = 0
    stopped: bool = False
    done: bool = False
    failure: str = ""
    message: str = ""

    @property
    def context(self) -> list[int]:
        """Token ids of the prompt and of the answer so far."""
        return [*self.example.prompt_ids, *self.tokens]

    @property
    def replies(self) -> int:
        """How many times the environment has replied."""
        return len(self.turns) // 2

    def request_seed(self) -> int | None:
        """Return a seed of its own for each request; the first is the answer's seed."""
        return seed_of_request(self.seed, self.requests)

    def append_completion(self, completion: Completion) -> None:
        """Append tokens that the policy generated."""
        self.append_generated(completion)
        self.requests += 1
        self.stopped = completion.stopped

    def apply(self, result: TurnResult) -> None:
        """Append the environment's reply, if it replied, and begin the policy's next turn; or finish the answer."""
        self.done, self.failure, self.message = result.done, result.failure, result.message
        self.truncated = result.truncated
        if result.tokens:
            self.turns += [result.turn, result.reply]
            self.append_written(result.tokens)
            self.turn_start = len(self.tokens)


def seed_of_request(seed: int | None, number: int) -> int | None:
    """Return the seed of an answer's request by its number; the first has the answer's, None if that is greedy."""
    if seed is None or number == 0:
        return seed
    return int.from_bytes(hashlib.sha256(f"{seed}/{number}".encode()).digest()[:4], "little")


@dataclass(frozen=True)
class TurnResult:
    """What follows a turn of the policy; the leading rank of a replica sends it to the others.

    Attributes:
        done: the answer is complete.
        turn: the policy's turn, as text.
        reply: the environment's reply to it; empty if the policy goes on within its turn.
        tokens: of the reply.
        failure, message, truncated: as of a `Trajectory`.
    """

    done: bool
    turn: str = ""
    reply: str = ""
    tokens: tuple[int, ...] = ()
    failure: str = ""
    message: str = ""
    truncated: bool = False


class Turns:
    """What follows each turn of the policy: the reply of the recipe's environment, or the end of the answer.

    Every rank of the group makes one of these together. Only the leading rank of a replica asks for what follows.
    """

    def __init__(self, recipe: Recipe, engine: Engine, tokenizer: Any, group: dist.ProcessGroup):
        rollout, reward = recipe.rollout, recipe.reward
        assert rollout is not None, "checked when the recipe was read"
        self._tokenizer = tokenizer
        self._end_token = tokenizer.eos_token_id
        self._end_tokens = {self._end_token, *engine.end_tokens}
        self._max_new_tokens, self._max_replies = rollout.max_new_tokens, rollout.max_turns
        self._runner: EnvironmentRunner | None = None
        self._stops = Stops()
        if rollout.environment is not None:
            self._runner = EnvironmentRunner(rollout.environment, reward.workers, reward.timeout_seconds)
            # The stop strings are in a user's module, which no rank imports: a process of its own loads it once.
            stops = check_environment(rollout.environment) if group.rank() == 0 else None
            self._stops = find_stops(tokenizer, broadcast_object(stops, group) or ())
        self._stop_tokens = pause_tokens(tokenizer, self._stops)
        self._ends = find_stops(tokenizer, rollout.stop)

    @property
    def have_environment(self) -> bool:
        """Whether anything replies, so that answers may have several turns."""
        return self._runner is not None

    def request(self, answer: Trajectory, sampling: Sampling) -> GenerationRequest:
        """Return the request for the next tokens of an answer."""
        return GenerationRequest(
            prompt_ids=answer.context,
            max_new_tokens=self._max_new_tokens - len(answer.tokens),
            stop_tokens=[self._end_token, *sorted(self._stop_tokens | self._ends.ids)],
            seed=answer.request_seed(),
            sampling=replace(sampling, stop=self._ends.texts),
        )

    def append(self, answer: Trajectory, completion: Completion) -> None:
        """Append what the policy generated, up to the token in which a stop of `rollout.stop` is complete.

        vLLM looks for these texts in the tokens of one request, and a turn may have several.
        """
        before = len(answer.tokens)
        answer.append_completion(completion)
        answer.stopped |= bool(completion.tokens) and completion.tokens[-1] in self._ends.ids
        if not self._ends.texts or answer.stopped or before == answer.turn_start:
            return

        def has_stop(length: int) -> bool:
            return any(stop in self._text(answer, answer.turn_start, length) for stop in self._ends.texts)

        if has_stop(len(answer.tokens)):
            lengths = range(before + 1, len(answer.tokens) + 1)
            answer.truncate(lengths[bisect_left(lengths, True, key=has_stop)])
            answer.stopped, answer.truncated = True, False

    def results(self, answers: Sequence[Trajectory]) -> list[TurnResult]:
        """Return what follows each answer's current turn, when all replies are there."""
        assert self._runner is not None, "without an environment an answer ends with its first turn"
        asking = [answer for answer in answers if self._has_ended_turn(answer)]
        replies = iter(self._runner.reply([self._item(answer) for answer in asking]))
        awaited = {id(answer) for answer in asking}
        return [self.result(answer, next(replies) if id(answer) in awaited else Reply("")) for answer in answers]

    def reply_soon(self, answer: Trajectory) -> Future[Reply]:
        """Ask for the reply to an answer's current turn, and return at once; it is empty where none is asked for."""
        assert self._runner is not None, "without an environment an answer ends with its first turn"
        if self._has_ended_turn(answer):
            return self._runner.reply_soon(self._item(answer))
        return completed(Reply(""))

    def result(self, answer: Trajectory, reply: Reply) -> TurnResult:
        """Return what follows a turn; a reply that leaves no room for one token of the policy is not appended.

        The answer is truncated then, and where the policy itself has run out of tokens.
        """
        if answer.stopped:
            return TurnResult(done=True)
        room, last = self._max_new_tokens - len(answer.tokens), answer.tokens[-1]
        if reply.text is None:
            return TurnResult(done=True, failure=reply.failure, message=reply.message)
        tokens = tuple(encode_part(self._tokenizer, reply.text, answer.context))
        ended = not tokens and (last in self._end_tokens or last not in self._stop_tokens)
        if ended:
            return TurnResult(done=True, truncated=answer.truncated)
        if len(tokens) >= room:
            return TurnResult(done=True, truncated=True)
        return TurnResult(done=False, turn=self._turn(answer), reply=reply.text, tokens=tokens)

    def close(self) -> None:
        """End the processes that environments run in."""
        if self._runner is not None:
            self._runner.close()

    def _turn(self, answer: Trajectory) -> str:
        """Return the policy's current turn as text."""
        return self._text(answer, answer.turn_start, len(answer.tokens))

    def _item(self, answer: Trajectory) -> ConversationItem:
        """Return the arguments of the environment."""
        return (*answer.turns, self._turn(answer)), answer.example.answer, answer.example.prompt

    def _has_ended_turn(self, answer: Trajectory) -> bool:
        """Return whether the environment is to reply: not where turns ran out, or vLLM paused or was cut elsewhere.

        It is asked also where no token is left: only a reply tells that the conversation would have gone on.
        """
        if answer.stopped or answer.replies >= self._max_replies:
            return False
        count = len(answer.tokens)
        if answer.tokens[-1] in self._end_tokens | self._stops.ids:
            return True
        return ends_with_stop(self._turn(answer), self._text(answer, count - 1, count), self._stops.texts)

    def _text(self, answer: Trajectory, start: int, end: int) -> str:
        """Return the text of these tokens of an answer."""
        prompt = len(answer.example.prompt_ids)
        return decode_part(self._tokenizer, answer.tokens[start:end], answer.context[: prompt + start])
