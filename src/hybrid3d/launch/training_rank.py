"""Runs a rank that trains in a child process, as those that do not train are to outlive it.

When one of the ranks that train is lost, the others end too, and all of them are started again: they go on from the
last checkpoint, and the others, whose engines are up, register with them.
"""

from __future__ import annotations

import itertools
import logging
import os
import sys
import threading
import time
from contextlib import suppress

import torch.distributed as dist
from msgspec.structs import replace
from torch.distributed.distributed_c10d import Store

from hybrid3d.config import Recipe
from hybrid3d.launch import rendezvous
from hybrid3d.launch.policies import Decision, decide_training
from hybrid3d.launch.rank_host import RankHost, become_parent
from hybrid3d.launch_environment import (
    CLOSE_SECONDS,
    DECIDED_SECONDS,
    DECISION_SECONDS,
    local_rank,
    rank,
    run_id,
)
from hybrid3d.ledger import TrainingAttempts, forget_beat, has_ended
from hybrid3d.process import kill_descendants, remove_shared_memory
from hybrid3d.run import terminal
from hybrid3d.run.ends import find_root_cause
from hybrid3d.run.folder import RunFolder
from hybrid3d.run.terminal import print_error

logger = logging.getLogger(__name__)


def run_training_rank(recipe: Recipe, folder: RunFolder, launched: bool) -> int:
    """Run this rank's command as a child process, again each time that a rank that trains is lost, until it ends.

    Args:
        launched: whether hybrid3d's own launcher reports the failure that ends the run.

    Returns:
        The exit code.
    """
    become_parent()
    host, stderr = RankHost(tells=False), terminal.duplicate_console(2)
    if rank() > 0:
        host.start()
    try:
        store = _connect()
    except rendezvous.RendezvousError as error:
        if rank() > 0:
            return host.wait(lambda states: False).code  # it has tried the same, and reports it
        if not error.reported_by_rank_0 and local_rank() == 0:
            print_error(stderr, f"{recipe.name}: {error}")
        return error.code
    if rank() == 0:
        host.start()
    starts, restarts = TrainingAttempts(store, recipe.world_size), 0
    for start in itertools.count():
        code = _wait(host, starts, start)
        no_answer = threading.Timer(DECIDED_SECONDS, os._exit, [1])
        no_answer.daemon = True
        no_answer.start()
        try:
            if code == 0 or (code > 0 and not rendezvous.have_met(store)):
                with suppress(dist.DistError):  # rank 0 may have ended before
                    starts.report_end(start, rank(), code)
                return code
            starts.fail(start)
            kill_descendants()
            forget_beat(store, rank())  # the next one comes after a start, which takes longer
            starts.report_end(start, rank(), code)
            if rank() > 0:
                again = starts.is_there_another(start, DECISION_SECONDS)
            else:
                codes = starts.await_ends(start, recipe.role_ranks["train"], CLOSE_SECONDS)
                decision = _decide(recipe, folder, codes, restarts, has_ended(store), launched)
                restarts += decision.counts
                again = decision.again
                starts.decide(start, again)
        except dist.DistError as error:  # the store is gone, and with it rank 0's node
            again = False
            if not launched and local_rank() == 0:
                print_error(stderr, find_root_cause(folder, {rank(): code}).message(folder))
                logger.error("%s", error)
        no_answer.cancel()
        if not again:
            break
        folder.failure_path(rank()).unlink(missing_ok=True)
        host.start()
    remove_shared_memory(run_id())
    return max(code, 1)


def _connect() -> Store:
    """Return the store of the run, which this process has if it is that of rank 0 and no agent has it."""
    with rendezvous.silenced_stderr():
        return rendezvous.connect("ranks")


def _wait(host: RankHost, starts: TrainingAttempts, start: int) -> int:
    """Wait until this rank's process of a start has ended, soon if another rank is lost; return its exit code."""
    failed, ended = threading.Event(), threading.Event()

    def watch() -> None:
        with suppress(dist.DistError):
            while not ended.is_set() and not starts.has_failed(start):
                time.sleep(starts.poll_seconds)
            failed.set()

    threading.Thread(target=watch, name="starts", daemon=True).start()  # the store may be stopped and never answer
    code = host.wait(lambda states: failed.is_set(), starts.poll_seconds).code
    ended.set()
    return code


def _decide(
    recipe: Recipe, folder: RunFolder, codes: dict[int, int], restarts: int, run_has_ended: bool, launched: bool
) -> Decision:
    """Print the cause and what follows from it; if nothing does, leave that to the launcher if there is one."""
    ranks, most = recipe.role_ranks["train"], recipe.run.max_restarts
    cause = find_root_cause(folder, {number: code for number, code in codes.items() if code}, ranks)
    decision = decide_training(cause, codes, ranks, restarts, most, run_has_ended)
    console = terminal.plain_console(file=sys.stdout if decision.again else sys.stderr)
    reported = not decision.again and replace(cause, final=decision.final).write(folder)
    if not (reported and launched):
        print_error(console, cause.message(folder))
    if decision.again:
        counted = f" ({restarts + 1} of run.max_restarts={most})" if decision.counts else ""
        print_error(console, f"starting the ranks that train again, from the last checkpoint{counted}")
    return decision
