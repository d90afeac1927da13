"""What the first rank that trains and the ranks that do not train send each other: typed messages, never unpickled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec
import numpy as np

from hybrid3d.generation.engine import Sampling
from hybrid3d.generation.samples import Sample
from hybrid3d.generation.scheduler import Answers, Prompt
from hybrid3d.run.metrics import Span, StepMetrics
from hybrid3d.scoring.scorer import Query, Scores
from hybrid3d.sync.elastic import Members

T = TypeVar("T", Sample, Query)


class Struct(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A message: what has a field more or less is none."""


class WithTexts(msgspec.Struct, Generic[T], frozen=True, forbid_unknown_fields=True):
    """Samples or queries, with the prompts and references that several of them have once.

    Attributes:
        items: without these texts.
        numbers: of the texts of each: its prompt, and its reference.
    """

    items: list[T]
    texts: list[str]
    numbers: list[tuple[int, int]]

    @classmethod
    def of(cls, items: Sequence[T]) -> WithTexts[T]:
        found: dict[str, int] = {}
        numbers = [
            (found.setdefault(one.prompt, len(found)), found.setdefault(one.reference, len(found))) for one in items
        ]
        return cls([replace(one, prompt="", reference="") for one in items], [*found], numbers)

    def whole(self) -> list[T]:
        """Return them with their texts, of which each is there once."""
        texts = self.texts
        pairs = zip(self.items, self.numbers, strict=True)
        return [replace(one, prompt=texts[prompt], reference=texts[reference]) for one, (prompt, reference) in pairs]


class Register(Struct, frozen=True):
    """Sent by a rank that does not train when it has started, and when the ranks that train have.

    Attributes:
        failure: why its process before this one ended; empty if this is the first.
        confined_by: what confines code that rewards run there; None if nothing does, or none is run.
        group_start: number of the start of its group, which is up since before the ranks that train were started
            again; None if it has not started yet.
    """

    rank: int
    failure: str = ""
    confined_by: str | None = None
    group_start: int | None = None


class Join(Struct, frozen=True):
    """Asks a rank to start what it serves with, unless that is up: all ranks of its group have registered.

    `start` is the number of this start of the group.
    """

    start: int


class Joined(Struct, frozen=True):
    """Sent when a rank has started what it serves with."""


class SyncWeights(Struct, frozen=True):
    """Asks a rank that generates to take part in a sync: arguments of `ElasticSync.begin`."""

    members: Members
    version: int
    verify: bool


class Advance(Struct, frozen=True):
    """Asks an engine for answers: arguments of `Replicas.advance`, with the numbers of its own replicas.

    A `stoppable` call returns early when another message has arrived.
    """

    prompts: dict[int, list[Prompt]]
    wanted: dict[int, int] | None
    version: int
    sampling: Sampling
    apart: bool = False
    stoppable: bool = False


class Score(Struct, frozen=True):
    """Asks for the rewards of answers.

    Attributes:
        shares: by the number of the replica that computes them; a rank that only computes rewards has number 0.
        scorer: of a rank that only computes rewards: `model`, or `function`, which all others have.
    """

    shares: dict[int, WithTexts[Query]]
    scorer: str = "function"


class Stop(Struct, frozen=True):
    """Asks for an early return from a call that generates ahead; without effect if it has returned."""


class Reply(Struct, frozen=True):
    """Sent when a call has returned, with what it returned on the ranks whose result is needed.

    Attributes:
        metrics: of a sync; None if a member of it has been lost.
        answers, scores: by the numbers of the call; the answers' samples stand apart.
        spans: what the rank did.
        peak_memory: the most bytes of memory that it used meanwhile; 0 if that was not measured.
    """

    metrics: StepMetrics | None = None
    answers: dict[int, Answers] = {}
    samples: dict[int, WithTexts[Sample]] = {}
    scores: dict[int, Scores] = {}
    spans: list[Span] = []
    peak_memory: int = 0

    @classmethod
    def of_answers(cls, found: Mapping[int, Answers]) -> Reply:
        """Return the reply with these answers."""
        answers = {number: replace(one, samples=[]) for number, one in found.items()}
        return cls(answers=answers, samples={number: WithTexts.of(one.samples) for number, one in found.items()})

    def whole_answers(self) -> dict[int, Answers]:
        """Return the answers with their samples."""
        return {number: replace(one, samples=self.samples[number].whole()) for number, one in self.answers.items()}


class Leave(Struct, frozen=True):
    """Asks a rank to exit: its group is not needed for now. It registers again."""


class End(Struct, frozen=True):
    """Asks a rank to exit: the run has ended."""


class Leaving(Struct, frozen=True):
    """Sent in answer to `Leave` and `End`."""


Call: TypeAlias = SyncWeights | Advance | Score
Message: TypeAlias = Register | Join | Joined | SyncWeights | Advance | Score | Stop | Reply | Leave | End | Leaving
DTYPES = ("<i4", "<f4", "|b1")  # of the arrays of samples and queries


def _encode_array(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.str in DTYPES:
        return [value.dtype.str, value.tobytes()]
    raise NotImplementedError(f"{type(value).__name__} is no part of a message")


def _decode_array(kind: Any, value: Any) -> Any:
    dtype, data = value
    if dtype not in DTYPES:
        raise ValueError(f"an array of {dtype!r}")
    return np.frombuffer(data, np.dtype(dtype)).copy()  # which can be written


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message, dec_hook=_decode_array)


def encode(message: Message) -> bytes:
    """Return a message as bytes.

    Raises:
        NotImplementedError, ValueError, OverflowError: it has a number of NumPy's, half of a character, or an integer
            of more than 64 bits.
    """
    return _encoder.encode(message)


def decode(data: bytes) -> Message:
    """Return the message that bytes are; raise `ValueError` if they are none."""
    try:
        return _decoder.decode(data)
    except RecursionError as error:
        raise ValueError("it nests too deep") from error
