"""Ranks that do not move: what a rank tells of it, for whom others wait, and the message that names them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hybrid3d.watch.wait_reasons import Wait

MAX_NAMED = 8  # ranks, and places, in a message


@dataclass(frozen=True)
class Standstill:
    """Where the main thread of a rank stands.

    Attributes:
        where: the innermost function of hybrid3d, and what it has called.
        waits: whether it waits for other ranks there.
        seconds: for which it has stood.
        step: that the rank is in, if it has begun one.
        wait: what it waits for, if that is known.
    """

    phase: str
    where: str
    waits: bool
    seconds: float
    step: int | None = None
    wait: Wait | None = None

    def __str__(self) -> str:
        return f"phase {self.phase}, in {self.where}"


def read_standstill(message: str) -> Standstill:
    """Return what a rank has told, as JSON of a standstill's fields."""
    fields = json.loads(message)
    if fields["wait"] is not None:
        fields["wait"] = Wait(**fields["wait"] | {"ranks": tuple(fields["wait"]["ranks"])})
    return Standstill(**fields)


def awaited_ranks(rank: int, known: Mapping[int, Standstill]) -> tuple[int, ...]:
    """Return the ranks that a rank waits for: of a collective, those that are not in the same one.

    Args:
        known: where ranks stand.
    """
    wait = known[rank].wait
    if wait is None:
        return ()
    here = {other for other, found in known.items() if found.wait == wait} if wait.together else set()
    return tuple(other for other in wait.ranks if other != rank and other not in here)


def places(known: Mapping[int, Standstill]) -> dict[str, list[int]]:
    """Return the ranks at each place."""
    found: dict[str, list[int]] = {}
    for rank, place in known.items():
        found.setdefault(str(place), []).append(rank)
    return found


def waits(known: Mapping[int, Standstill]) -> dict[str, list[int]]:
    """Return the ranks that wait for the same ranks in the same call, by a text that says both."""
    found: dict[str, list[int]] = {}
    for rank, standstill in known.items():
        if standstill.wait is not None:
            found.setdefault(_wait_text(rank, known), []).append(rank)
    return found


def waits_for(lost: int, known: Mapping[int, Standstill]) -> str:
    """Return which ranks wait for one that is lost, and in what, as the end of a message; empty if none is known to."""
    by_call: dict[str, list[int]] = {}
    for rank, found in known.items():
        if found.wait is not None and lost in awaited_ranks(rank, known):
            by_call.setdefault(f"{_call_text(found.wait)}, in phase {found.phase}", []).append(rank)
    told = [
        f"{list_ranks(ranks)} {'wait' if len(ranks) > 1 else 'waits'} for it ({call})"
        for call, ranks in by_call.items()
    ]
    return "; " + ", ".join(told) if told else ""


def standstill_message(
    named: Mapping[int, Standstill],
    known: Mapping[int, Standstill],
    everyone: bool,
    role_of: Callable[[int], str] = lambda rank: "",
) -> str:
    """Return which ranks stand, where and for how long, and for whom the others wait.

    Args:
        named: those that the message is about: if there are any that do not wait, these; otherwise all ranks.
        known: these, and others that wait for others, maybe not for as long.
        everyone: whether all ranks stand.
        role_of: returns the role of a rank; empty if it goes without saying.
    """
    seconds, others = max(found.seconds for found in named.values()), len(known) - len(named)
    if any(not found.waits for found in named.values()):
        subject = "one rank has" if len(named) == 1 else f"{len(named)} ranks have"
        start = f"{subject} not moved for {seconds:.0f} s" + (f", and {others} wait for others" if others else "")
    else:
        start = f"all ranks have waited for each other for {seconds:.0f} s"
    lines: dict[str, list[int]] = {}
    for rank in [*named, *(other for other in known if other not in named)]:
        found, role = known[rank], role_of(rank)
        if rank in named or found.wait is not None:
            text = f"{f'{role}, ' if role else ''}{'' if found.step is None else f'step {found.step}, '}{found}"
            waiting = "" if found.wait is None else f", waiting {_wait_text(rank, known)}"
            lines.setdefault(text + waiting, []).append(rank)
    logs = "all logs" if everyone else "their logs"
    told = [f"{list_ranks(ranks)}: {line}" for line, ranks in list(lines.items())[:MAX_NAMED]]
    return "\n  ".join([f"{start} (Python stacks are in {logs}):", *told])


def list_ranks(ranks: Sequence[int]) -> str:
    """Return the names of ranks, of many only the first ones."""
    more = f" and {len(ranks) - MAX_NAMED} more" if len(ranks) > MAX_NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:MAX_NAMED]))}{more}"


def _wait_text(rank: int, known: Mapping[int, Standstill]) -> str:
    wait, awaited = known[rank].wait, awaited_ranks(rank, known)
    assert wait is not None
    return f"for {list_ranks(awaited) if awaited else 'each other'} ({_call_text(wait)})"


def _call_text(wait: Wait) -> str:
    return f"{wait.call} of {list_ranks(wait.ranks)}" if wait.together else wait.call
