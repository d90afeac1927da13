"""Partial rollouts: no step waits for its longest answers, which stop between two tokens and go on in the next step.

An environment's replies are awaited while other answers are generated, and during training and syncs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass

from hybrid3d.config import Async
from hybrid3d.generation.engine import Completion, Engine, Sampling
from hybrid3d.generation.turns import Trajectory, TurnResult, Turns
from hybrid3d.rl.data import Example
from hybrid3d.scoring.environments import Reply

POLL_SECONDS = 0.05  # while all answers wait for replies

Place = tuple[int, int]
"""Where a prompt is in the data: the number of its batch, and its index in the batch."""


@dataclass(frozen=True)
class Prompt:
    """A prompt that was drawn, to be answered once with each seed, or greedily where it is None.

    Attributes:
        version: of the weights that begin it.
    """

    place: Place
    example: Example
    seeds: Sequence[int | None]
    version: int


@dataclass(frozen=True, eq=False)
class PromptGroup:
    """A prompt and the answers to it, which are trained together.

    Attributes:
        version: of the weights when the prompt was drawn: no token of the answers is from older weights. It stays when
            answers restart.
        answers: by their numbers among all answers of the replica.
    """

    place: Place
    version: int
    answers: dict[int, Trajectory]

    @property
    def done(self) -> bool:
        """Whether all answers are complete."""
        return all(answer.done for answer in self.answers.values())


class PartialRollout:
    """The prompts of one replica that are being answered, over several steps.

    All ranks of the replica make all calls together.

    Attributes:
        dropped_tokens: how many generated tokens were dropped so far.
    """

    def __init__(self, engine: Engine, turns: Turns, settings: Async):
        self._engine, self._turns, self._settings = engine, turns, settings
        self._groups: list[PromptGroup] = []
        self._numbers = 0  # of answers so far
        self._paused: set[int] = set()  # answers that the engine goes on with by itself
        self._awaiting: set[int] = set()  # answers whose environment has not replied yet
        self._replies: dict[int, Future[Reply]] = {}  # of these, on the leading rank
        self.dropped_tokens = 0

    @property
    def places(self) -> list[Place]:
        """The places of all prompts that were added and not taken."""
        return [group.place for group in self._groups]

    def add(self, prompt: Prompt) -> None:
        """Add a prompt."""
        answers = {self._numbers + i: Trajectory(prompt.example, seed) for i, seed in enumerate(prompt.seeds)}
        self._numbers += len(answers)
        self._groups.append(PromptGroup(prompt.place, prompt.version, answers))

    def generate(self, version: int, wanted: int, sampling: Sampling, stop: Callable[[], bool] | None = None) -> None:
        """Generate until `wanted` prompts can be taken, or `stop` returns True, and interrupt the other answers.

        Args:
            version: the engine's weights must have this version or a later one.
            stop: called between two tokens, on the leading rank.
        """
        if self._settings.partial == "restart":
            self._restart_answers_before(version)
        answers = {n: answer for group in self._groups for n, answer in group.answers.items() if not answer.done}
        held = self._awaiting | self._paused
        self._submit({n: answer for n, answer in answers.items() if n not in held}, version, sampling)
        stopped = enough = self._can_take(wanted, version)
        while not (stopped or enough):
            self._end_turns(answers, self._engine.step())
            idle = all(answer.done or number in self._awaiting for number, answer in answers.items())
            stopped, results = self._agree(stop, idle)
            for number, result in results.items():
                self._awaiting.remove(number)
                answers[number].apply(result)
            self._submit({n: answers[n] for n, result in results.items() if not result.done}, version, sampling)
            enough = any(answer.done for answer in answers.values()) and self._can_take(wanted, version)
            answers = {number: answer for number, answer in answers.items() if not answer.done}
        for number, completion in self._interrupt(answers).items():
            if completion.tokens:
                self._turns.append(answers[number], completion)
            if answers[number].stopped:
                answers[number].done = True
                self._end_request(number)

    def _interrupt(self, answers: Mapping[int, Trajectory]) -> dict[int, Completion]:
        """Stop the engine between two tokens; return what unfinished answers have gained since it was asked last."""
        if not self._settings.keep_cache:
            return self._engine.interrupt()
        ended, paused = self._engine.pause()
        self._end_turns(answers, ended)
        self._paused = set(paused)
        return paused

    def _end_turns(self, answers: Mapping[int, Trajectory], completions: Mapping[int, Completion]) -> None:
        for number, completion in completions.items():
            self._turns.append(answers[number], completion)
            self._paused.discard(number)
            self._end_turn(number, answers[number])

    def end_requests(self) -> None:
        """End the requests that are paused, before the engine is asked for other answers; they are submitted again."""
        self._engine.cancel(sorted(self._paused))
        self._paused.clear()

    def reset(self) -> None:
        """Drop all prompts."""
        for group in self._groups:
            for number, answer in group.answers.items():
                self._forget(number, answer)
        self._groups = []

    def _restart_answers_before(self, version: int) -> None:
        """Begin unfinished answers again of which older weights have generated a part."""
        for group in self._groups:
            for number, answer in group.answers.items():
                if not answer.done and answer.versions and answer.versions[-1] < version:
                    self._forget(number, answer)
                    group.answers[number] = Trajectory(answer.example, answer.seed)

    def take(self, count: int, version: int) -> list[PromptGroup]:
        """Remove and return the oldest prompts whose answers are all complete, at most `count`, for this step.

        Those that would be too old in the next step are dropped. With `async.late_answers: wait` there are none, unless
        a run resumes with other replicas and one of them has more than its share of the prompts that were unfinished.
        """
        done = self._done()[:count]
        rest = [group for group in self._groups if group not in done]
        oldest = version + 1 - self._settings.max_staleness
        for group in rest:
            if group.version < oldest:
                for number, answer in group.answers.items():
                    self._forget(number, answer)
        self._groups = [group for group in rest if group.version >= oldest]
        return done

    def _done(self) -> list[PromptGroup]:
        """Return the prompts whose answers are all complete, the oldest first."""
        return sorted((group for group in self._groups if group.done), key=lambda group: group.place)

    def _can_take(self, wanted: int, version: int) -> bool:
        """Return whether enough prompts are done, and no other prompt will be too old before it can be taken."""
        done = self._done()
        if len(done) == len(self._groups) or len(done) < wanted or self._settings.late_answers == "drop":
            return len(done) >= min(wanted, len(self._groups))
        staleness = self._settings.max_staleness
        rest = [*done[wanted:], *(group for group in self._groups if not group.done)]
        # For each number of following steps: the prompts that must be trained within them must fit in their batches
        return all(
            sum(group.version + staleness <= version + steps for group in rest) <= steps * wanted
            for steps in range(staleness + 1)
        )

    def _submit(self, answers: dict[int, Trajectory], version: int, sampling: Sampling) -> None:
        requests = {number: self._turns.request(answer, sampling) for number, answer in answers.items()}
        self._engine.submit(requests, version)

    def _end_turn(self, number: int, answer: Trajectory) -> None:
        """Ask for the environment's reply to a turn that the policy has ended; without one the answer is complete."""
        if not self._turns.have_environment:
            answer.done = True
            return
        self._awaiting.add(number)
        if self._engine.leads:
            self._replies[number] = self._turns.reply_soon(answer)

    def _agree(self, stop: Callable[[], bool] | None, idle: bool) -> tuple[bool, dict[int, TurnResult]]:
        """Return whether to stop, and what follows turns by number of their answer, as the leading rank says."""
        if stop is None and not self._turns.have_environment:
            return False, {}
        said = None
        if self._engine.leads:
            if idle:
                wait(self._replies.values(), POLL_SECONDS, FIRST_COMPLETED)
            said = stop is not None and stop(), self._results()
        agreed: tuple[bool, dict[int, TurnResult]] = self._engine.broadcast(said)
        return agreed

    def _results(self) -> dict[int, TurnResult]:
        """Return what follows the turns whose replies have arrived."""
        arrived = [number for number, reply in self._replies.items() if reply.done()]
        if not arrived:
            return {}
        answers = {number: answer for group in self._groups for number, answer in group.answers.items()}
        return {number: self._turns.result(answers[number], self._replies.pop(number).result()) for number in arrived}

    def _forget(self, number: int, answer: Trajectory) -> None:
        """Drop the tokens of an answer, and the reply that it waits for."""
        self.dropped_tokens += sum(answer.loss_mask)
        self._awaiting.discard(number)
        self._end_request(number)
        if number in self._replies:
            self._replies.pop(number).cancel()

    def _end_request(self, number: int) -> None:
        """End the request of an answer if it is paused."""
        if number in self._paused:
            self._paused.remove(number)
            self._engine.cancel([number])
