"""Stalled ranks: what such a rank tells of itself, for whom others wait, and the message that names them.

Another thread reads from a thread's stack where it is, and whether and for which ranks it waits. What is waited for is
in the stack already: the process group of a collective, the stages of a pipeline, the message of a sync. Objects of
hybrid3d that wait tell it by a method `awaited`, which returns what they wait for and the ranks that it comes from; an
executor of a sync tells its bucket by `awaited_bucket`. Nothing is recorded before somebody asks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType

import torch.distributed as dist

from hybrid3d.distributed import launcher_ranks

# Where a rank waits for others: anywhere in the stack, in its innermost function, and in the innermost one of hybrid3d.
# On GPUs it may also do so elsewhere, where it first needs a result.
WAITING_ANYWHERE = ("torch.distributed.distributed_c10d", "vllm.distributed.")
WAITING_INNERMOST = (
    *("megatron.core.distributed.", "megatron.core.pipeline_parallel.", "megatron.core.tensor_parallel."),
    *("hybrid3d.reshard.move.transport", "hybrid3d.reshard.move.nixl", "hybrid3d.reshard.move.lent_memory"),
    *("hybrid3d.distributed", "hybrid3d.generation.exchange"),
)
WAITING_OURS = ("hybrid3d.workers.", "hybrid3d.sync.", "hybrid3d.trainer.remote_generator")
# Modules whose functions have their process group in these variables, or in these attributes of `self`. The variables
# of other functions are not read: Python would keep their values until these functions return.
COLLECTIVES = "torch.distributed.distributed_c10d"
ENGINES = ("megatron.core.", "vllm.distributed.")
PEERS = {"recv": "src", "send": "dst"}  # the variables that have the other end
GROUPS = ("group", "pp_group", "tp_group", "data_parallel_group", "cpu_group")
# Modules of objects that tell what they wait for
TELLING = ("hybrid3d.reshard.", "hybrid3d.workers.", "hybrid3d.trainer.remote_generator")


@dataclass(frozen=True)
class Wait:
    """What a rank waits for.

    Attributes:
        call: a collective, or what is to arrive.
        ranks: those of the launcher that take part in the collective, or that are to send or to return messages.
        together: all of the ranks make the same call, so that it is waited for those that do not.
    """

    call: str
    ranks: tuple[int, ...]
    together: bool


def describe_frame(frame: FrameType) -> tuple[str, bool]:
    """Return where a thread is, by its innermost frame, and whether it waits for other ranks there."""
    waits, ours = waits_for_others(frame)
    where = _name(frame) if ours is None or ours is frame else f"{_name(ours)} > {_name(frame)}"
    return where, waits


def waits_for_others(frame: FrameType) -> tuple[bool, FrameType | None]:
    """Return whether a thread waits for other ranks, by its innermost frame, and its innermost frame of hybrid3d."""
    waits, ours = _module(frame).startswith(WAITING_INNERMOST), None
    found: FrameType | None = frame
    while found is not None:
        module = _module(found)
        waits = waits or module.startswith(WAITING_ANYWHERE)
        if ours is None and module.startswith("hybrid3d."):
            ours = found
            waits = waits or module.startswith(WAITING_OURS)
        found = found.f_back
    return waits, ours


def find_wait(frame: FrameType) -> Wait | None:
    """Return what a thread that waits for other ranks waits for, by its innermost frame; None if that is not known."""
    wait: Wait | None = None
    found: FrameType | None = frame
    while found is not None:
        module = _module(found)
        if wait is None:
            if module == COLLECTIVES:
                wait = _collective(found)
            elif found is frame and module.startswith(ENGINES):  # an outer one may have another group
                wait = _in_group(found)
            elif module.startswith(TELLING):
                wait = _told(found)
        if wait is not None and module.startswith(TELLING):
            bucket = getattr(found.f_locals.get("self"), "awaited_bucket", str)()
            if bucket:
                return Wait(f"{bucket}, {wait.call}", wait.ranks, wait.together)
        found = found.f_back
    return wait


def _collective(frame: FrameType) -> Wait | None:
    """Return the collective of a function of torch.distributed, if it has a process group."""
    variables, name = frame.f_locals, frame.f_code.co_name
    if "group" not in variables:
        return None
    group = variables["group"] or dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        return None
    ranks = launcher_ranks(group)
    if name in PEERS:
        peer, of_default = variables.get(f"group_{PEERS[name]}"), variables.get(PEERS[name])
        if peer is None and of_default is not None:
            peer = dist.get_group_rank(group, of_default)
        if peer is not None:
            return Wait(f"{name}, rank {ranks[peer]} at the other end", (ranks[peer],), together=False)
    return Wait(name, ranks, together=True)


def _in_group(frame: FrameType) -> Wait | None:
    """Return what a function of an engine waits in: the first process group that it, or its object, has."""
    variables = frame.f_locals
    owner = variables.get("self")
    for group in (*map(variables.get, GROUPS), *(getattr(owner, name, None) for name in GROUPS)):
        if isinstance(group, dist.ProcessGroup):
            return Wait(frame.f_code.co_name.strip("_"), launcher_ranks(group), together=True)
    return None


def _told(frame: FrameType) -> Wait | None:
    told: tuple[str, Sequence[int]] | None = getattr(frame.f_locals.get("self"), "awaited", lambda: None)()
    return None if told is None else Wait(told[0], tuple(told[1]), together=False)


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "?"))


def _name(frame: FrameType) -> str:
    return f"{_module(frame)}.{frame.f_code.co_qualname}:{frame.f_lineno}"


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


def awaited_ranks(rank: int, known: Mapping[int, Standstill]) -> tuple[int, ...]:
    """Return the ranks that a rank waits for: of a collective, those that are not known to be in the same one."""
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
