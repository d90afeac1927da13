"""Where a thread is, whether it waits for other ranks there, and for which: read from its stack, by another thread.

What is waited for is in the stack already: the process group of a collective, the stages of a pipeline, the message of
a sync. Objects of hybrid3d that wait tell it by a method `awaited`, which returns what they wait for and the ranks that
it comes from; an executor of a sync tells its bucket by `awaited_bucket`. Nothing is recorded before somebody asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType

import torch.distributed as dist

from hybrid3d.distributed import launcher_ranks

# Where a rank waits for others: anywhere in the stack, in its innermost function, and in the innermost one of hybrid3d.
# On GPUs it may also do so elsewhere, where it first needs a result.
WAITING_ANYWHERE = ("torch.distributed.distributed_c10d", "vllm.distributed.")
WAITING_INNERMOST = (
    *("megatron.core.distributed.", "megatron.core.pipeline_parallel.", "megatron.core.tensor_parallel."),
    *("hybrid3d.reshard.move.transport", "hybrid3d.reshard.move.lent_memory"),
    *("hybrid3d.distributed", "hybrid3d.generation.delivery"),
)
WAITING_OURS = ("hybrid3d.workers.", "hybrid3d.sync.", "hybrid3d.trainer.remote_generator", "hybrid3d.trainer.ahead")
# Modules whose functions have their process group in these variables, or in these attributes of `self`. The variables
# of other functions are not read: Python would keep their values until these functions return.
COLLECTIVES = "torch.distributed.distributed_c10d"
ENGINES = ("megatron.core.", "vllm.distributed.")
PEERS = {"recv": "src", "send": "dst"}  # the variables that have the other end
GROUPS = ("group", "pp_group", "tp_group", "data_parallel_group", "cpu_group")
# Modules of objects that tell what they wait for
TELLING = ("hybrid3d.reshard.", "hybrid3d.workers.", "hybrid3d.trainer.remote_generator", "hybrid3d.trainer.ahead")


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
