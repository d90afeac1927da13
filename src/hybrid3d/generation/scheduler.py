"""The one loop over the engine of a replica: which requests it gets, and which prompts are answered.

What makes an answer go on is a `Continuation`: a turn of the policy is all of it, an environment replies, or an agent
calls. Only the leading rank of a replica has one; the others do with the engine what that rank has decided.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, Protocol, TypeAlias, TypeVar

from hybrid3d.config import Async
from hybrid3d.generation.engine import Completion, Engine, GenerationRequest, Sampling
from hybrid3d.generation.samples import Sample
from hybrid3d.rl.data import Example

Place: TypeAlias = tuple[int, int]
"""Where a prompt is in the data: the number of its batch, and its index in the batch."""

Stop: TypeAlias = "Callable[[], bool] | None"


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


class Talk(Protocol):
    """An answer that is being made, and the kind of failure that ended it, empty if none did; `message` says more."""

    failure: str
    message: str

    @property
    def done(self) -> bool:
        """Whether it is complete."""
        ...

    @property
    def generated(self) -> int:
        """How many tokens the policy has generated."""
        ...

    @property
    def newest_version(self) -> int:
        """The version of the weights that generated last."""
        ...


T = TypeVar("T", bound=Talk)


@dataclass(frozen=True)
class News:
    """What the leading rank of a replica has decided, for the others: new requests by number, and cancelled ones.

    Once it is `done`, nothing more is to be generated for now.
    """

    requests: Mapping[int, GenerationRequest] = field(default_factory=dict)
    cancelled: Sequence[int] = ()
    done: bool = False


class Continuation(Protocol[T]):
    """What makes answers go on; the kinds of its failures begin with `failed`."""

    failed: str

    def open(self, prompt: Prompt) -> Sequence[T]:
        """Return answers that begin, one for each seed."""
        ...

    def restarted(self, talk: T) -> T:
        """Return the answer from its beginning on, in the place of what was generated of it."""
        ...

    def begin(self, talks: Sequence[T], sampling: Sampling) -> News:
        """Go on with these answers: return the requests that the engine does not have yet."""
        ...

    def follow(self, ended: Mapping[int, Completion], is_idle: bool) -> News:
        """Return what follows ended requests, and what came from elsewhere; without requests it may wait for some."""
        ...

    def interrupt(self, ended: Mapping[int, Completion], parts: Mapping[int, Completion], kept: bool) -> Sequence[int]:
        """Take what the engine has generated when it was stopped between two tokens; return the requests to drop.

        Args:
            ended: requests that have ended.
            parts: what the others have generated.
            kept: the engine has these still.
        """
        ...

    def release(self) -> None:
        """Take note that the engine has no request any more."""
        ...

    def drop(self, talks: Iterable[T]) -> Sequence[int]:
        """Forget answers; return the numbers of their requests that the engine has."""
        ...

    def samples(self, talk: T) -> Sequence[Sample]:
        """Return the samples of an answer that is complete, without rewards but for those that it was given."""
        ...


@dataclass(frozen=True)
class Answers:
    """Answers of one replica, which are not scored yet.

    Attributes:
        samples: all answers to a prompt in a row, each with all its branches.
        failures: conversations that an environment or an agent failed in, by kind; `examples` has a text of each.
        unfinished: the prompts that the replica has still.
        dropped_tokens: how many generated tokens it has dropped since it was asked last.
    """

    samples: list[Sample] = field(default_factory=list)
    failures: dict[str, int] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)
    unfinished: list[Place] = field(default_factory=list)
    dropped_tokens: int = 0


@dataclass(frozen=True, eq=False)
class PromptGroup(Generic[T]):
    """A prompt and the answers to it, which are trained together.

    No token of the answers is from older weights than `version`, which stays when answers restart.
    """

    place: Place
    version: int
    talks: list[T]

    @property
    def done(self) -> bool:
        """Whether all answers are complete."""
        return all(talk.done for talk in self.talks)


class Prompts(Generic[T]):
    """The prompts of a replica that are being answered, on its leading rank: what is asked for, and what is enough.

    With `settings.partial`, unfinished answers are kept for later calls; without it each call waits for all.
    """

    def __init__(self, continuation: Continuation[T], settings: Async):
        self._continuation, self._settings = continuation, settings
        self._groups: list[PromptGroup[T]] = []
        self._unfinished: list[T] = []
        self._wanted = self._share = self._version = 0
        self._stop: Stop = None
        self._dropped_tokens = 0
        self._taken: list[PromptGroup[T]] = []

    def begin(
        self, prompts: Iterable[Prompt], wanted: int | None, version: int, sampling: Sampling, stop: Stop
    ) -> News:
        """Begin to generate until `wanted` prompts are answered, all if it is None, or `stop` returns True."""
        cancelled = self._restart_before(version)
        for prompt in prompts:
            self._groups.append(PromptGroup(prompt.place, prompt.version, [*self._continuation.open(prompt)]))
        # What is missing of a step is asked for again with its version: the first call of one has the whole share
        self._share = max(wanted or 0, self._share if version == self._version else 0)
        self._wanted, self._version, self._stop = len(self._groups) if wanted is None else wanted, version, stop
        self._unfinished = [talk for group in self._groups for talk in group.talks if not talk.done]
        news = self._continuation.begin(self._unfinished, sampling)
        return replace(news, cancelled=[*cancelled, *news.cancelled], done=self._is_enough())

    def follow(self, ended: Mapping[int, Completion], is_idle: bool) -> News:
        """Return what follows requests that have ended."""
        news = self._continuation.follow(ended, is_idle)
        stopped = bool(self._stop and self._stop())
        before, self._unfinished = self._unfinished, [talk for talk in self._unfinished if not talk.done]
        changed = len(self._unfinished) < len(before)
        return replace(news, done=stopped or not before or (changed and self._is_enough()))

    def end(self, ended: Mapping[int, Completion], parts: Mapping[int, Completion], gives: bool) -> News:
        """Take what the engine has generated when it was stopped; choose the answers to give back, if any shall be."""
        cancelled = [*self._continuation.interrupt(ended, parts, self._settings.keeps_cache)]
        if gives:
            self._taken, late = self._take()
            cancelled += self._drop(late)
        return News(cancelled=cancelled)

    def answers(self) -> Answers:
        """Return the answers that were chosen."""
        taken, self._taken = self._taken, []
        dropped, self._dropped_tokens = self._dropped_tokens, 0
        talks = [talk for group in taken for talk in group.talks]
        samples = [sample for talk in talks for sample in self._continuation.samples(talk)]
        failed = [(f"{self._continuation.failed}{talk.failure}", talk.message) for talk in talks if talk.failure]
        counts, unfinished = dict(Counter(kind for kind, _ in failed)), [group.place for group in self._groups]
        return Answers(samples, counts, dict(reversed(failed)), unfinished, dropped)

    def release(self, version: int) -> None:
        """Take note that the engine has no request any more, and is asked for other answers by this version's weights.

        Agents' answers go on beside those others, so that what restarts with this version does so here.
        """
        self._continuation.release()
        self._restart_before(version)

    def reset(self) -> None:
        """Drop all prompts, as those who asked are lost."""
        self._drop(self._groups)
        self._groups, self._dropped_tokens = [], 0

    def _restart_before(self, version: int) -> list[int]:
        """Begin unfinished answers again of which older weights have generated a part, if the recipe says so."""
        cancelled: list[int] = []
        for group in self._groups if self._settings.partial == "restart" else ():
            for place, talk in enumerate(group.talks):
                if not talk.done and talk.generated and talk.newest_version < version:
                    cancelled += self._forget([talk])
                    group.talks[place] = self._continuation.restarted(talk)
        return cancelled

    def _take(self) -> tuple[list[PromptGroup[T]], list[PromptGroup[T]]]:
        """Remove the oldest prompts that are done, at most as many as are wanted, and those that will be too old.

        With `async.late_answers: wait` there are none of the latter, unless a run resumes with other replicas and one
        of them has more than its share of the prompts that were unfinished.
        """
        done = self._done()[: self._wanted]
        rest = [group for group in self._groups if group not in done]
        oldest = self._version + 1 - self._settings.max_staleness
        self._groups = [group for group in rest if group.version >= oldest]
        return done, [group for group in rest if group.version < oldest]

    def _done(self) -> list[PromptGroup[T]]:
        """Return the prompts whose answers are all complete, the oldest first."""
        return sorted((group for group in self._groups if group.done), key=lambda group: group.place)

    def _is_enough(self) -> bool:
        """Return whether enough prompts are done, and no other prompt will be too old before it can be taken."""
        done, wanted = self._done(), self._wanted
        if len(done) == len(self._groups) or len(done) < wanted or self._settings.late_answers == "drop":
            return len(done) >= min(wanted, len(self._groups))
        staleness = self._settings.max_staleness
        rest = [*done[wanted:], *(group for group in self._groups if not group.done)]
        # For each number of following steps: the prompts that must be trained within them must fit in their batches.
        # A replica of which none are wanted now has fewer prompts than others, and has a share again in time
        share = max(1, self._share)
        return all(
            sum(group.version + staleness <= self._version + steps for group in rest) <= steps * share
            for steps in range(staleness + 1)
        )

    def _drop(self, groups: Iterable[PromptGroup[T]]) -> list[int]:
        return self._forget([talk for group in groups for talk in group.talks])

    def _forget(self, talks: Sequence[T]) -> list[int]:
        """Drop answers with their tokens; return the numbers of their requests that the engine has."""
        self._dropped_tokens += sum(talk.generated for talk in talks)
        return [*self._continuation.drop(talks)]


class Scheduler(Generic[T]):
    """Generates the answers of one replica. All its ranks make all calls together, but for `reset`.

    Args:
        prompts: on the leading rank; they have the same settings.
        listens: something comes from elsewhere while the engine generates, such as replies or calls.
        agree: of replicas that step together: returns whether all of them are done.
    """

    def __init__(
        self,
        engine: Engine,
        prompts: Prompts[T] | None,
        settings: Async,
        listens: bool = False,
        agree: Callable[[bool], bool] = bool,
    ):
        self._engine, self._prompts, self._settings, self._listens = engine, prompts, settings, listens
        self._agree = agree
        self._running: set[int] = set()  # the requests that the engine has

    def advance(
        self, prompts: Iterable[Prompt], wanted: int | None, version: int, sampling: Sampling, stop: Stop, gives: bool
    ) -> Answers | None:
        """Generate until enough prompts are answered, and stop the engine between two tokens.

        Args:
            wanted: how many prompts are to be answered; None: all that there are.
            version: the engine's weights must have this version or a later one.
            stop: called between two tokens, on the leading rank; if it returns True, that is enough.
            gives: return answers, at most as many as are wanted; they are on the leading rank.
        """
        lead, at_each_token = self._prompts, bool(stop) or self._listens
        at_ends_alone = not (self._settings.partial or at_each_token)
        news = self._do(None if lead is None else lead.begin(prompts, wanted, version, sampling, stop), version)
        while not self._agree(news.done):
            ended = self._engine.drain() if at_ends_alone else self._engine.step()
            self._running -= ended.keys()
            if ended or not self._running or at_each_token:
                news = self._do(None if lead is None else lead.follow(ended, not self._running), version)
        ended, parts = dict[int, Completion](), dict[int, Completion]()
        if self._settings.keeps_cache:
            ended, parts = self._engine.pause()
        elif not at_ends_alone:
            parts = self._engine.interrupt()
        self._running = set(parts) if self._settings.keeps_cache else set()
        self._do(None if lead is None else lead.end(ended, parts, gives), version)
        return None if lead is None else lead.answers()

    def release(self, version: int) -> None:
        """End the engine's requests, to be begun again, before it is asked for others by this version's weights."""
        self._engine.cancel(sorted(self._running))
        self._running.clear()
        if self._prompts is not None:
            self._prompts.release(version)

    def reset(self) -> None:
        """Drop all prompts, as those who asked are lost."""
        self.release(version=0)  # of no older weights, so that nothing restarts
        if self._prompts is not None:
            self._prompts.reset()

    def _do(self, news: News | None, version: int) -> News:
        """Do what the leading rank has decided, and return it."""
        decided = self._engine.broadcast(news)
        self._engine.cancel(decided.cancelled)
        self._running -= {*decided.cancelled}
        self._engine.submit(decided.requests, version)
        self._running |= decided.requests.keys()
        return decided
