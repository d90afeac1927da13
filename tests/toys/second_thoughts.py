"""A toy continuation: each answer has two parts, and between them the text that asks for the second one."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hybrid3d.generation.engine import Completion, GenerationRequest, Sampling
from hybrid3d.generation.samples import AnswerTokens, Sample
from hybrid3d.generation.scheduler import News, Prompt
from hybrid3d.rl.data import Example

AGAIN, END, MOST = 99, 0, 50  # what is written between both parts, what ends a part, and how long one may be


@dataclass(eq=False)
class Thought:
    example: Example
    seed: int | None
    version: int
    answer: AnswerTokens = field(default_factory=AnswerTokens)
    parts: int = 0
    failure: str = ""
    message: str = ""

    @property
    def done(self) -> bool:
        return self.parts == 2

    @property
    def generated(self) -> int:
        return self.answer.generated

    @property
    def newest_version(self) -> int:
        return max(self.answer.versions, default=self.version)


class SecondThoughts:
    """Implements `Continuation`; engines keep nothing of what they are stopped in."""

    failed = ""

    def __init__(self) -> None:
        self._numbers, self._asked, self._sampling = itertools.count(), dict[int, Thought](), Sampling()

    def open(self, prompt: Prompt) -> list[Thought]:
        return [Thought(prompt.example, seed, prompt.version) for seed in prompt.seeds]

    def restarted(self, talk: Thought) -> Thought:
        return Thought(talk.example, talk.seed, talk.version)

    def begin(self, talks: Sequence[Thought], sampling: Sampling) -> News:
        self._sampling = sampling
        return News(dict(map(self._ask, talks)))

    def follow(self, ended: Mapping[int, Completion], is_idle: bool) -> News:
        return News(dict(self._ask(talk) for talk in self._take(ended) if not talk.done))

    def interrupt(self, ended: Mapping[int, Completion], parts: Mapping[int, Completion], kept: bool) -> list[int]:
        for number, part in [*ended.items(), *parts.items()]:
            self._asked.pop(number).answer.append_generated(part)
        self._asked.clear()
        return []

    def release(self) -> None:
        self._asked.clear()

    def drop(self, talks: Iterable[Thought]) -> list[int]:
        gone = {id(talk) for talk in talks}
        numbers = [number for number, talk in self._asked.items() if id(talk) in gone]
        for number in numbers:
            del self._asked[number]
        return numbers

    def samples(self, talk: Thought) -> list[Sample]:
        return [talk.answer.sample(talk.example, talk.example.prompt_ids, "")]

    def _ask(self, talk: Thought) -> tuple[int, GenerationRequest]:
        number = next(self._numbers)
        self._asked[number] = talk
        context = (*talk.example.prompt_ids, *talk.answer.tokens)
        return number, GenerationRequest(context, MOST, [END], talk.seed, self._sampling)

    def _take(self, ended: Mapping[int, Completion]) -> list[Thought]:
        talks = [self._asked.pop(number) for number in ended]
        for talk, completion in zip(talks, ended.values(), strict=True):
            talk.answer.append_generated(completion)
            talk.parts += 1
            if not talk.done:
                talk.answer.append_written([AGAIN])
        return talks
