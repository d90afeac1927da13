"""Answers that consist of turns of the policy and replies of an environment."""

from __future__ import annotations

import hashlib
import itertools
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist

from hybrid3d.config import Recipe
from hybrid3d.distributed import broadcast_object
from hybrid3d.generation.engine import Completion, Engine, GenerationRequest, Sampling
from hybrid3d.generation.samples import AnswerTokens, Sample
from hybrid3d.generation.scheduler import News, Prompt
from hybrid3d.generation.stops import Stops, ends_with_stop, find_stops, pause_tokens
from hybrid3d.rl.data import Example
from hybrid3d.rl.token_texts import TokenTexts, decode_part, encode_part
from hybrid3d.scoring.environments import EnvironmentRunner, Reply, check_environment, completed

POLL_SECONDS = 0.05  # while all answers wait for replies
OF_ENVIRONMENT = "environment_"  # prefix of the kinds of failures of environments, not of rewards


@dataclass
class Trajectory(AnswerTokens):
    """An answer that is being generated, with the replies of an environment.

    Attributes:
        seed: of the first request; None samples greedily.
        number: of its requests, one of which the engine has at a time.
        turns: texts of the policy and of the environment, alternating, without the policy's current turn.
        turn_start: index in `tokens` of the policy's current turn.
        requests: how many the engine has completed for this answer.
        failure: the kind of the environment's failure that ended it; empty if there was none. `message` says more.
    """

    example: Example
    seed: int | None
    number: int = 0
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
    def newest_version(self) -> int:
        """The version of the weights that generated last."""
        return self.versions[-1]

    @property
    def replies(self) -> int:
        """How many times the environment has replied."""
        return len(self.turns) // 2

    def append_completion(self, completion: Completion) -> None:
        """Append tokens that the policy generated."""
        self.append_generated(completion)
        self.requests += 1
        self.stopped = completion.stopped


def seed_of(text: str) -> int:
    """Return the seed of what a text names, which is equal in every layout."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")


def seed_of_request(seed: int | None, number: int) -> int | None:
    """Return the seed of an answer's request by its number; the first has the answer's, None if that is greedy."""
    if seed is None or number == 0:
        return seed
    return seed_of(f"{seed}/{number}")


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
        self._stop_tokens = pause_tokens(TokenTexts(tokenizer), self._stops)
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
            seed=seed_of_request(answer.seed, answer.requests),
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

    def replies(self, answers: Sequence[Trajectory], soon: bool) -> list[Future[Reply]]:
        """Ask for the replies to answers' current turns, which are empty where none is asked for.

        If it is to be `soon`, no reply waits for another; otherwise all are there on return.
        """
        assert self._runner is not None, "without an environment an answer ends with its first turn"
        asking = [answer for answer in answers if self._has_ended_turn(answer)]
        items = [((*one.turns, self._turn(one)), one.example.answer, one.example.prompt) for one in asking]
        found = map(self._runner.reply_soon, items) if soon else map(completed, self._runner.reply(items))
        replies = dict(zip((answer.number for answer in asking), found, strict=True))
        return [replies.get(answer.number) or completed(Reply("")) for answer in answers]

    def go_on(self, answer: Trajectory, reply: Reply) -> None:
        """Append a reply and begin the policy's next turn, or finish the answer.

        A reply that leaves no room for one token of the policy is not appended. The answer is truncated then, and where
        the policy itself has run out of tokens.
        """
        answer.done = True
        if answer.stopped:
            answer.truncated = False
            return
        if reply.text is None:
            answer.truncated, answer.failure, answer.message = False, reply.failure, reply.message
            return
        tokens, last = encode_part(self._tokenizer, reply.text, answer.context), answer.tokens[-1]
        if not tokens and (last in self._end_tokens or last not in self._stop_tokens):
            return
        answer.done = answer.truncated = len(tokens) >= self._max_new_tokens - len(answer.tokens)
        if tokens and not answer.done:
            answer.turns += [self._turn(answer), reply.text]
            answer.append_written(tokens)
            answer.turn_start = len(answer.tokens)

    def text(self, answer: Trajectory) -> str:
        """Return an answer as text."""
        return self._text(answer, 0, len(answer.tokens))

    def close(self) -> None:
        """End the processes that environments run in."""
        if self._runner is not None:
            self._runner.close()

    def _turn(self, answer: Trajectory) -> str:
        return self._text(answer, answer.turn_start, len(answer.tokens))

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
        prompt = len(answer.example.prompt_ids)
        return decode_part(self._tokenizer, answer.tokens[start:end], answer.context[: prompt + start])


class Conversations:
    """Implements `Continuation`: the policy has one turn, or as many as the recipe's environment replies to.

    Args:
        waves: all answers' turns are awaited, and then all their replies, so that a run repeats bit for bit; otherwise
            an answer goes on as soon as its reply is there.
    """

    failed = OF_ENVIRONMENT

    def __init__(self, turns: Turns, waves: bool):
        self._turns, self._waves = turns, waves
        self._numbers = itertools.count()
        self._sampling = Sampling()
        self._running: dict[int, Trajectory] = {}  # whose requests the engine has
        self._replies: dict[int, tuple[Trajectory, Future[Reply]]] = {}  # that are awaited

    def open(self, prompt: Prompt) -> list[Trajectory]:
        return [Trajectory(prompt.example, seed, next(self._numbers)) for seed in prompt.seeds]

    def restarted(self, talk: Trajectory) -> Trajectory:
        return Trajectory(talk.example, talk.seed, talk.number)

    def begin(self, talks: Sequence[Trajectory], sampling: Sampling) -> News:
        self._sampling, held = sampling, self._running.keys() | self._replies.keys()
        return self._requests([talk for talk in talks if talk.number not in held])

    def follow(self, ended: Mapping[int, Completion], is_idle: bool) -> News:
        self._end_turns(ended)
        if is_idle and self._replies and not self._waves:  # where all replies are there already
            wait([reply for _, reply in self._replies.values()], POLL_SECONDS, FIRST_COMPLETED)
        going_on = []
        for number, (talk, reply) in sorted(self._replies.items()):
            if reply.done():
                del self._replies[number]
                self._turns.go_on(talk, reply.result())
                going_on += [] if talk.done else [talk]
        return self._requests(going_on)

    def interrupt(self, ended: Mapping[int, Completion], parts: Mapping[int, Completion], kept: bool) -> list[int]:
        self._end_turns(ended)
        for number, completion in parts.items():
            if completion.tokens:
                self._turns.append(self._running[number], completion)
            self._running[number].done = self._running[number].stopped
        stopped = [number for number in parts if self._running[number].done]
        self._running = {number: talk for number, talk in self._running.items() if kept and not talk.done}
        return stopped if kept else []

    def release(self) -> None:
        self._running = {}

    def drop(self, talks: Iterable[Trajectory]) -> list[int]:
        numbers = [talk.number for talk in talks]
        for number in numbers:
            if number in self._replies:
                self._replies.pop(number)[1].cancel()
        return [number for number in numbers if self._running.pop(number, None) is not None]

    def samples(self, talk: Trajectory) -> list[Sample]:
        return [talk.sample(talk.example, talk.example.prompt_ids, self._turns.text(talk))]

    def _requests(self, talks: Sequence[Trajectory]) -> News:
        self._running |= {talk.number: talk for talk in talks}
        return News({talk.number: self._turns.request(talk, self._sampling) for talk in talks})

    def _end_turns(self, ended: Mapping[int, Completion]) -> None:
        """Ask for the environment's replies to turns that have ended; without one the answers are complete."""
        talks = [self._running.pop(number) for number in sorted(ended)]
        for talk in talks:
            self._turns.append(talk, ended[talk.number])
            talk.done = not self._turns.have_environment
        if talks and self._turns.have_environment:
            replies = self._turns.replies(talks, soon=not self._waves)
            self._replies |= {talk.number: (talk, reply) for talk, reply in zip(talks, replies, strict=True)}
