"""Sends the results of the ranks of one role to the ranks of the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from hybrid3d.distributed import all_reduce_max, broadcast_object

T = TypeVar("T")


def share(work: Callable[[], T], group: dist.ProcessGroup, first: int) -> T:
    """Do the work, and send its result to the ranks that call `receive`, or the error that all ranks of the role raise.

    Args:
        group: the ranks of all roles.
        first: the lowest rank of the role that works, whose result is sent.
    """
    outcome: T | Exception
    try:
        outcome = work()
    except Exception as error:
        if not getattr(error, "raised_on_all_ranks", False):
            raise
        outcome = error
    broadcast_object(outcome, group, first)
    return _result(outcome)


def receive(group: dist.ProcessGroup, first: int) -> Any:
    """Return what the ranks that call `share` have found, or raise the error that all of them have raised."""
    return _result(broadcast_object(None, group, first))


def _result(outcome: T | Exception) -> T:
    if isinstance(outcome, Exception):
        outcome.raised_in_all_roles = True  # type: ignore[attr-defined]
        raise outcome
    return outcome


def announce_update(store: dist.Store, step: int) -> None:
    """Let the ranks that generate know that the update of this step is done; one rank calls this."""
    store.set("updated", str(step))


def is_updated(store: dist.Store, step: int) -> bool:
    """Return whether the update of this step is done."""
    return store.check(["updated"]) and int(store.get("updated")) >= step


def meet(group: dist.ProcessGroup) -> None:
    """Wait until all ranks of the group are here; not a barrier, which on GPUs would wait for the GPUs too."""
    all_reduce_max([0], group)


def wait_for_all(store: dist.Store, rank: int, ranks: int) -> None:
    """Let rank 0, whose process may have the store, wait until all ranks have shut their engines down."""
    store.set(f"closed/{rank}", "")
    if rank == 0:
        store.wait([f"closed/{other}" for other in range(ranks)])
