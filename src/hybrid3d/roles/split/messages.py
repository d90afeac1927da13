"""What the first rank that trains and the ranks that generate say to each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hybrid3d.run.timeline import Span


@dataclass(frozen=True)
class Hello:
    """A rank that generates has started, and does not have an engine yet.

    Attributes:
        lost: why its process before this one ended; empty if this is the first.
        confined_by: what confines code that rewards run there; None if nothing does, or none is run.
    """

    rank: int
    lost: str = ""
    confined_by: str | None = None


@dataclass(frozen=True)
class Join:
    """All ranks of an engine are there: start it.

    Attributes:
        incarnation: how many times the engine was started before.
    """

    incarnation: int


@dataclass(frozen=True)
class Joined:
    """The engine of a rank has started."""


@dataclass(frozen=True)
class Call:
    """Call a method of the rank, with these arguments."""

    method: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Leave:
    """The engine is not needed for now: exit, and wait to be needed again."""


@dataclass(frozen=True)
class Stop:
    """Return from a call that generates ahead; without effect if it has returned."""


@dataclass(frozen=True)
class Reply:
    """A call has returned.

    Attributes:
        result: on ranks whose result is not needed None.
        spans: what the rank did.
        peak_memory: in bytes, of its GPU.
    """

    result: Any
    spans: list[Span] = field(default_factory=list)
    peak_memory: int = 0
