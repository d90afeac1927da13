"""The messages between the first rank that trains and the ranks that do not train."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hybrid3d.run.timeline import Span


@dataclass(frozen=True)
class Register:
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


@dataclass(frozen=True)
class Join:
    """Asks a rank to start what it serves with, unless that is up: all ranks of its group have registered.

    Attributes:
        start: number of this start of the group.
    """

    start: int


@dataclass(frozen=True)
class Joined:
    """Sent when a rank has started what it serves with."""


@dataclass(frozen=True)
class Call:
    """Asks a rank to call this method of what it serves with, with these arguments.

    Attributes:
        stoppable: it returns early when another message has arrived.
    """

    method: str
    arguments: Mapping[str, Any]
    stoppable: bool = False


@dataclass(frozen=True)
class Stop:
    """Asks for an early return from a call that generates ahead; without effect if it has returned."""


@dataclass(frozen=True)
class Reply:
    """Sent when a call has returned.

    Attributes:
        result: on ranks whose result is not needed None.
        spans: what the rank did.
        peak_memory: the most bytes of memory that it used meanwhile; 0 if that was not measured.
    """

    result: Any
    spans: list[Span] = field(default_factory=list)
    peak_memory: int = 0


@dataclass(frozen=True)
class Leave:
    """Asks a rank to exit: its group is not needed for now. It registers again."""


@dataclass(frozen=True)
class End:
    """Asks a rank to exit: the run has ended."""


@dataclass(frozen=True)
class Leaving:
    """Sent in answer to `Leave` and `End`."""
