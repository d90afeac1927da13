"""Runs a function of a test as several ranks, each a process that is forked from one that has imported torch.

That process has computed nothing. One that is forked from the tests' own, which may have computed with several threads
by then, can hang in torch. All hash strings alike and have the environment of the first ones: what could depend on that
is started by `torch.multiprocessing.spawn`.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp

multiprocessing.set_forkserver_preload(
    [
        "hypothesis",
        "torch.distributed",
        "hybrid3d.generation.exchange",
        "hybrid3d.reshard.delta.executor",
        "hybrid3d.reshard.move.transport",
        "hybrid3d.reshard.plan.coverage",
    ]
)


def spawn(function: Callable[..., None], arguments: tuple[Any, ...], ranks: int) -> None:
    """Call `function(rank, *arguments)` in as many processes as there are ranks, and wait for all of them.

    Raises:
        torch.multiprocessing.ProcessRaisedException: one of them failed; the message has its traceback.
    """
    mp.start_processes(function, arguments, ranks, start_method="forkserver")
