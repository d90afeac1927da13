"""Runs a rank that trains in a child process, as those that generate are to outlive it.

When one of the ranks that train is lost, the others end too, and all of them are started again: they go on from the
last checkpoint, and those that generate, whose engines are up, register with them.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from hybrid3d.config import Recipe
from hybrid3d.launch import rendezvous
from hybrid3d.launch.failures import failure_message, find_root_cause, print_error, write_failure
from hybrid3d.launch.restarts import RESTART_COUNT
from hybrid3d.launch_environment import CHECKED, local_rank, rank
from hybrid3d.process import adopt_orphans, kill_descendants, kill_when_parent_exits
from hybrid3d.roles.split.connections import has_ended
from hybrid3d.roles.split.training_starts import TrainingStarts
from hybrid3d.run import terminal
from hybrid3d.run.run_folder import RunFolder

EXIT_SECONDS = 10.0  # within which ranks that have lost a peer have written why they fail, and have ended
REPORT_SECONDS = 60.0  # within which the parents of all ranks report
DECISION_SECONDS = 120.0  # within which rank 0's parent has decided
STOPPED = -signal.SIGTERM  # exit code of a rank that was killed because another one is lost


def run_training_rank(recipe: Recipe, folder: RunFolder, launched: bool) -> int:
    """Run this rank's command as a child process, again each time that a rank that trains is lost, until it ends.

    Args:
        launched: whether hybrid3d's own launcher reports the failure that ends the run.

    Returns:
        The exit code.
    """
    kill_when_parent_exits(os.getppid())
    adopt_orphans()
    stderr = terminal.plain_console(file=os.fdopen(os.dup(2), "w"))
    first = None if rank() == 0 else _start(0)
    try:
        store = _connect()
    except rendezvous.RendezvousError as error:
        if first is not None:
            return first.wait()  # it has tried the same, and reports it
        if not error.reported_by_rank_0 and local_rank() == 0:
            print_error(stderr, f"{recipe.name}: {error}")
        return error.code
    starts, restarts = TrainingStarts(store, recipe.world_size), 0
    for start in itertools.count():
        if start:
            with suppress(dist.DistError):  # the next heartbeat comes after a start, which takes longer
                store.delete_key(f"beat/{rank()}")
            folder.failure_path(rank()).unlink(missing_ok=True)
        child = first if start == 0 and first is not None else _start(start)
        code = _wait(child, starts, start)
        kill_descendants()
        try:
            if code > 0 and not rendezvous.have_met(store):
                return code  # as it has reported
            starts.report_end(start, rank(), code)
            if code == 0:
                return 0
            starts.fail(start)
            if rank() > 0:
                again = starts.is_there_another(start, DECISION_SECONDS)
            else:
                codes = starts.await_ends(start, recipe.role_ranks["train"], REPORT_SECONDS)
                cause, again = _decide(recipe, folder, codes, restarts, has_ended(store))
                _tell(recipe, folder, cause, restarts, again, launched)
                restarts += again and cause["kind"] != "out_of_memory"
                starts.decide(start, again)
        except dist.DistError:  # the store is gone, and with it rank 0's node
            again = False
        if not again:
            break
    return max(code, 1)


def _connect() -> dist.Store:
    """Return the store of the run, which this process has if it is that of rank 0 and no agent has it."""
    stderr = os.dup(2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # where the store prints its errors
    try:
        return rendezvous.connect("ranks")
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


def _start(start: int) -> subprocess.Popen[bytes]:
    variables = os.environ | {RESTART_COUNT: str(start), CHECKED: "1"}  # the checks are done
    return subprocess.Popen([sys.executable, "-m", "hybrid3d", *sys.argv[1:]], env=variables)


def _wait(child: subprocess.Popen[bytes], starts: TrainingStarts, start: int) -> int:
    """Wait until the process ends, or end it if another rank is lost; return its exit code, negative for a signal."""
    ends_at = None
    while True:
        with suppress(subprocess.TimeoutExpired):
            return child.wait(starts.poll_seconds)
        with suppress(dist.DistError):
            if ends_at is None and starts.has_failed(start):
                ends_at = time.monotonic() + EXIT_SECONDS
        if ends_at is not None and time.monotonic() > ends_at:
            child.kill()
            child.wait()
            return STOPPED


def _decide(
    recipe: Recipe, folder: RunFolder, codes: dict[int, int], restarts: int, ended: bool
) -> tuple[dict[str, Any], bool]:
    """Return the failure that caused the others, and whether all ranks that train are started again.

    Args:
        codes: the exit codes of their processes.
        restarts: how often they were started again.
        ended: whether those that generate have been told that the run has ended.
    """
    failed = {number: SimpleNamespace(exitcode=code) for number, code in codes.items() if code}
    cause = find_root_cause(folder, failed)
    if cause["kind"] == "out_of_memory":
        more = True  # with settings that need less
    else:
        more = restarts < recipe.run.max_restarts and not cause.get("on_all_ranks")
    return cause, more and not ended and len(failed) == len(recipe.role_ranks["train"])


def _tell(recipe: Recipe, folder: RunFolder, cause: dict[str, Any], restarts: int, again: bool, launched: bool) -> None:
    """Print the cause and what follows from it; if nothing does, leave that to the launcher if there is one."""
    console = terminal.plain_console(file=sys.stdout if again else sys.stderr)
    reported = not again and write_failure(folder.failure_path(cause["rank"]), cause | {"final": True})
    if not (reported and launched):
        print_error(console, failure_message(folder, cause["rank"], cause))
    if again and cause["kind"] == "out_of_memory":
        print_error(console, "starting the ranks that train again, from the last checkpoint")
    elif again:
        counted = f"{restarts + 1} of run.max_restarts={recipe.run.max_restarts}"
        print_error(console, f"starting the ranks that train again, from the last checkpoint ({counted})")
