"""Runs one rank: in this process, or in a child process that is started again when it is lost."""

from __future__ import annotations

import sys
import time
from contextlib import suppress

import torch.distributed as dist

from hybrid3d import distributed
from hybrid3d.config import Recipe
from hybrid3d.launch import rendezvous
from hybrid3d.launch.child import RunEnd, is_child, run_with_restarts
from hybrid3d.launch.failures import failure_message, failure_record, print_error, write_failure
from hybrid3d.launch.supervisor import run_training_rank
from hybrid3d.launch.worker import Task, run_process
from hybrid3d.launch_environment import BEAT_SECONDS
from hybrid3d.run import terminal
from hybrid3d.run.folder import RunFolder
from hybrid3d.workers.channel import has_ended


def run_rank(recipe: Recipe, folder: RunFolder, task: Task, launched: bool, restarts: bool = False) -> int:
    """Run a task as one rank.

    Args:
        restarts: whether, where there are ranks that do not train, ranks are started again when they are lost: each of
            those by itself, and all that train together, as often as the recipe says.

    The other arguments and the result are those of `run_process`.
    """
    if not (restarts and recipe.has_serving_ranks) or is_child():
        return run_process(recipe, folder, task, launched or is_child(), restarts)
    rank = distributed.rank()
    if rank not in recipe.role_ranks["train"]:
        return _run_serving_rank(recipe, folder, rank, launched)
    if recipe.run.max_restarts:
        return run_training_rank(recipe, folder, launched)
    return run_process(recipe, folder, task, launched, restarts)


def _run_serving_rank(recipe: Recipe, folder: RunFolder, rank: int, launched: bool) -> int:
    role = recipe.role_of(rank)
    code, why, of_peer = run_with_restarts(folder, role, getattr(recipe.roles, role).max_restarts, RunEnd(_await_end))
    if why:
        reason = failure_record(rank, why, of_peer)
        if not (write_failure(folder.failure_path(rank), reason) and launched) and not of_peer:
            print_error(terminal.plain_console(file=sys.stderr), failure_message(folder, rank, reason))
    return code


def _await_end() -> None:
    """Wait until the run has ended, or the store of it is gone."""
    with suppress(dist.DistError, rendezvous.RendezvousError):
        store = rendezvous.connect("ranks")
        while not has_ended(store):
            time.sleep(BEAT_SECONDS)
