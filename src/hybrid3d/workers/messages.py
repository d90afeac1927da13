"""What the first rank that trains and the ranks that do not train send each other: typed, so nothing is unpickled."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec
import numpy as np

from hybrid3d.generation.engine import Sampling
from hybrid3d.generation.scheduler import Answers, Prompt
from hybrid3d.run.metrics import StepMetrics
from hybrid3d.run.timeline import Span
from hybrid3d.scoring.scorer import Query, Scores
from hybrid3d.sync.elastic import Members


class Register(msgspec.Struct, frozen=True, tag=True):
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


class Join(msgspec.Struct, frozen=True, tag=True):
    """Asks a rank to start what it serves with, unless that is up: all ranks of its group have registered.

    Attributes:
        start: number of this start of the group.
    """

    start: int


class Joined(msgspec.Struct, frozen=True, tag=True):
    """Sent when a rank has started what it serves with."""


class Sync(msgspec.Struct, frozen=True, tag=True):
    """Asks a rank that generates to take part in a sync: arguments of `ElasticSync.begin`."""

    members: Members
    version: int
    verify: bool


class Advance(msgspec.Struct, frozen=True, tag=True):
    """Asks an engine for answers: arguments of `Replicas.advance`, with the numbers of its own replicas.

    Attributes:
        stoppable: it returns early when another message has arrived.
    """

    prompts: dict[int, list[Prompt]]
    wanted: dict[int, int] | None
    version: int
    sampling: Sampling
    apart: bool = False
    stoppable: bool = False


class Score(msgspec.Struct, frozen=True, tag=True):
    """Asks for the rewards of answers.

    Attributes:
        shares: by the number of the replica that computes them; a rank that only computes rewards has number 0.
        scorer: of a rank that only computes rewards: `model`, or `function`, which all others have.
    """

    shares: dict[int, list[Query]]
    scorer: str = "function"


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Asks for an early return from a call that generates ahead; without effect if it has returned."""


class Reply(msgspec.Struct, frozen=True, tag=True):
    """Sent when a call has returned, with what it returned on the ranks whose result is needed.

    Attributes:
        metrics: of a sync; None if a member of it has been lost.
        answers, scores: by the numbers of the call.
        spans: what the rank did.
        peak_memory: the most bytes of memory that it used meanwhile; 0 if that was not measured.
    """

    metrics: StepMetrics | None = None
    answers: dict[int, Answers] = {}
    scores: dict[int, Scores] = {}
    spans: list[Span] = []
    peak_memory: int = 0


class Leave(msgspec.Struct, frozen=True, tag=True):
    """Asks a rank to exit: its group is not needed for now. It registers again."""


class End(msgspec.Struct, frozen=True, tag=True):
    """Asks a rank to exit: the run has ended."""


class Leaving(msgspec.Struct, frozen=True, tag=True):
    """Sent in answer to `Leave` and `End`."""


Call: TypeAlias = Sync | Advance | Score
Message: TypeAlias = Register | Join | Joined | Sync | Advance | Score | Stop | Reply | Leave | End | Leaving


def _encode_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return [value.dtype.str, value.tobytes()]
    raise NotImplementedError(f"{type(value).__name__} is no part of a message")


def _decode_array(kind: Any, value: Any) -> Any:
    dtype, data = value
    return np.frombuffer(data, np.dtype(dtype)).copy()  # of one dimension, and writable


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message, dec_hook=_decode_array)


def encode(message: Message) -> bytes:
    """Return a message as bytes."""
    return _encoder.encode(message)


def decode(data: bytes) -> Message:
    """Return the message that bytes are.

    Raises:
        ValueError: they are none.
    """
    return _decoder.decode(data)
