"""Runs one rank: in this process, or in a child process that is started again when it is lost.

The process redirects its output to the rank's log, runs the task, and reports its failure.
"""

from __future__ import annotations

import faulthandler
import functools
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal

import torch.distributed as dist
from rich.console import Console
from torch.distributed.distributed_c10d import Store

from hybrid3d import distributed, launch_environment
from hybrid3d.config import Recipe
from hybrid3d.distributed import clone_store
from hybrid3d.errors import set_stream_errors
from hybrid3d.launch import rendezvous
from hybrid3d.launch.rank_host import run_serving_rank, run_training_rank
from hybrid3d.launch.run_secret import adopt_secret, write_secret
from hybrid3d.launch_environment import DISCONNECTED, RUN_LOST, State
from hybrid3d.ledger import RankStart, TrainingAttempts, read_beat
from hybrid3d.process import (
    adopt_orphans,
    is_child,
    kill_descendants,
    kill_when_parent_exits,
    remove_shared_memory,
    set_shared_memory_prefix,
    this_process,
)
from hybrid3d.run import terminal
from hybrid3d.run.ends import Ended
from hybrid3d.run.folder import RunFolder
from hybrid3d.run.oom_recovery import OutOfMemoryRestart, find_out_of_memory
from hybrid3d.run.terminal import print_error
from hybrid3d.storage.disk import CheckpointWriteError
from hybrid3d.watch.heartbeat import Heartbeat
from hybrid3d.watch.watchdog import Watchdog

logger = logging.getLogger(__name__)

Task = Callable[[RankStart], None]
"""The work of a rank: a function of its rank, the rendezvous store, and a console on rank 0 (None on other ranks).

It first builds the default process group with the store.
"""


def run_process(recipe: Recipe, folder: RunFolder, task: Task, launched: bool, restarts: bool) -> int:
    """Run a task as one rank, in this process.

    The output of the rank and of all libraries goes to its log. The reason of a failure is written, in one line, to
    a file for the launcher. A rank that is not the first to fail usually fails because it has lost its peer.

    Args:
        launched: whether hybrid3d's own launcher started the rank and reports failures; under torchrun and srun the
            rank reports its own.
        restarts: whether ranks that do not train are started again when they are lost, so that the others do not end.

    Returns:
        The exit code: 0 for success, 1 for a failure, 2 if the ranks were not started with the same settings.
    """
    kill_when_parent_exits()  # the launcher, which ranks must not outlive
    adopt_orphans()  # processes that a reward started, after their pool was killed
    child, rank = this_process(), launch_environment.rank()
    folder.logs.mkdir(parents=True, exist_ok=True)
    folder.failure_path(rank).unlink(missing_ok=True)
    # Where NCCL's flight recorder writes what each rank was doing when a collective hung; it appends the rank
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(folder.logs / "nccl-rank-"))
    stderr = terminal.duplicate_console(2)
    console = _redirect(folder.log_path(rank), keep_console=rank == 0)
    _log_as(rank)
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # writes Python stacks to the log, whatever the rank is in
    try:
        late = recipe.late_ranks if restarts else range(0)  # in other commands all ranks build a group
        again = child.restart_count > 0
        if rank == 0 and not again:
            write_secret(folder)
        store = rendezvous.meet(rendezvous.describe_rank(recipe), again=again, late=late)
    except rendezvous.RendezvousError as error:
        logger.error("%s", error)
        if again and error.code == 1:  # the run's store is gone
            child.tell(State.ENDING)
        elif again:
            Ended(rank, str(error)).write(folder)
        elif not error.reported_by_rank_0 and launch_environment.local_rank() == 0:
            print_error(stderr, f"{recipe.name}: {error}")
        return error.code
    set_shared_memory_prefix(launch_environment.run_id())

    try:
        adopt_secret(recipe, folder, store, rank)
        watchdog = _start_watchdog(recipe, folder, store, launched, stderr, late)
        on_lost = functools.partial(_report_lost_rank, folder, launched, stderr, watchdog.describe_lost)
        heartbeat = _start_heartbeat(recipe, folder, store, on_lost, restarts)
        task(RankStart(rank, store, console, child))
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
        watchdog.stop()
        heartbeat.stop()
        kill_descendants()
        return 0
    # The boundary of the process: every error is reported and ends it. SystemExit and PyTorch's checkpoint errors are
    # not subclasses of Exception.
    except BaseException as error:
        end = _end_by(rank, error)
        reported = end.write(folder) and launched
        if not reported and not end.peer and (rank == 0 or not end.on_all_ranks):
            print_error(stderr, end.message(folder))
        try:
            with suppress(OSError):  # the disk of its log may be full
                traceback.print_exception(error)
                sys.stderr.flush()
            kill_descendants()
            remove_shared_memory(launch_environment.run_id(), engines=not is_child())
        finally:
            os._exit(1)  # communication threads may be waiting for ranks that have exited


def _start_watchdog(
    recipe: Recipe, folder: RunFolder, store: Store, launched: bool, stderr: Console, late: range
) -> Watchdog:
    on_seen = functools.partial(_report_seen, folder, stderr)
    on_deadlock = functools.partial(_end_deadlock, folder, launched, stderr)
    role_of = recipe.role_of if recipe.has_workers else lambda rank: ""
    ranks = launch_environment.world_size()
    return Watchdog(store, launch_environment.rank(), ranks, on_seen, role_of, on_deadlock, late)


def _start_heartbeat(
    recipe: Recipe, folder: RunFolder, store: Store, on_lost: Callable[[int, str], None], restarts: bool
) -> Heartbeat:
    """Start the heartbeat of this rank; `on_lost` is called for a lost rank of those that all end together."""
    rank, trains = launch_environment.rank(), launch_environment.world_size()
    if restarts:
        trains = len(recipe.role_ranks["train"])
    if rank < trains:
        watched = 0 if trains == 1 < launch_environment.world_size() else None  # itself: those that do not train do
        return Heartbeat(store, rank, trains, on_lost, watched)
    # The parent of this rank watches it, and starts it again; it does not know whether the run has ended
    if recipe.run.max_restarts:  # it outlives those that train
        record = functools.partial(_record_lost_rank, folder)
        on_silent = functools.partial(_fail_training, folder, store) if trains == 1 else None
        return Heartbeat(store, rank, trains, record, rank if trains > 1 else 0, on_silent, DISCONNECTED)
    if trains > 1:  # the next rank that trains reports rank 0
        return Heartbeat(store, rank, trains, _exit_disconnected, watched=0)
    return Heartbeat(store, rank, trains, on_lost, watched=0, exit_code=RUN_LOST)


def _exit_disconnected(lost_rank: int, message: str) -> None:
    """Exit, and let that rank live: whoever reports it may not have done so yet."""
    logger.error("rank %d: %s", lost_rank, message)
    os._exit(DISCONNECTED)


def _record_lost_rank(folder: RunFolder, lost_rank: int, message: str) -> None:
    logger.error("rank %d: %s", lost_rank, message)
    with suppress(OSError):
        Ended(lost_rank, message).write(folder, exclusive=True)


def _fail_training(folder: RunFolder, store: Store, lost_rank: int, message: str, beat: str) -> bool:
    """Report the only rank that trains, which its parent starts again, while this one waits for the next start.

    Returns:
        False if it beats again, or another rank has reported it, and there is a next start.
    """
    with suppress(dist.DistError):
        starts, store = TrainingAttempts(store, launch_environment.world_size()), clone_store(store)
        start = starts.latest()
        if read_beat(store, lost_rank) == beat:
            _record_lost_rank(folder, lost_rank, message)
            starts.fail(start)
            return True
    return False


def _report_lost_rank(
    folder: RunFolder,
    launched: bool,
    stderr: Console,
    describe_lost: Callable[[int], str],
    lost_rank: int,
    message: str,
) -> None:
    """Report a rank that does not answer, with those that wait for it, and clean up, as this process exits too."""
    message += describe_lost(lost_rank)
    with suppress(OSError):  # the disk of its log may be full
        logger.error("rank %d: %s", lost_rank, message)
    end = Ended(lost_rank, message)
    try:
        reported = end.write(folder, exclusive=True) and launched
    except FileExistsError:  # the lost rank has reported its own failure, or another rank has reported it
        reported = True
    if not reported:
        print_error(stderr, end.message(folder))
    remove_shared_memory(launch_environment.run_id(), engines=not is_child())


def _end_deadlock(folder: RunFolder, launched: bool, stderr: Console, message: str) -> None:
    """Report that all ranks wait for each other, and end this process, without which the others end, too."""
    try:
        _report_lost_rank(folder, launched, stderr, lambda rank: "", launch_environment.rank(), message)
    finally:
        os._exit(1)


def _report_seen(folder: RunFolder, stderr: Console, event: str, message: str, fields: dict[str, object]) -> None:
    """Print which ranks do not move or are slow, and write an event of it in the folder of a run that trains."""
    print_error(stderr, message)
    with suppress(OSError, CheckpointWriteError):  # the disk may be full
        if folder.logs.parent == folder.path:  # not those of another command, such as `eval`
            folder.add_event(event, **fields)


def _log_as(rank: int) -> None:
    """Make hybrid3d's loggers write to this rank's log, with the rank in each line."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter(f"%(asctime)s rank {rank} %(levelname)s %(name)s: %(message)s"))
    package = logging.getLogger("hybrid3d")
    package.handlers, package.propagate = [handler], False
    package.setLevel(logging.INFO)


def _redirect(log: Path, keep_console: bool) -> Console | None:
    """Redirect stdout and stderr, including those of C++ code, to the log; optionally keep a console on stdout."""
    console = terminal.duplicate_console(1) if keep_console else None
    sys.stdout.flush()
    sys.stderr.flush()
    log_fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log_fd, 1)
    os.dup2(log_fd, 2)
    os.close(log_fd)
    set_stream_errors("utf-8")  # the log is a text file like others, whatever the locale is
    return console


def _end_by(rank: int, error: BaseException) -> Ended:
    kind: Literal["error", "out_of_memory"] = "out_of_memory" if isinstance(error, OutOfMemoryRestart) else "error"
    if getattr(error, "raised_on_all_ranks", False):
        return Ended(rank, str(error), on_all_ranks=True, kind=kind)
    reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return Ended(rank, reason, peer=_is_lost_peer(error), kind=kind)


def _is_lost_peer(error: BaseException) -> bool:
    """Return whether an error only says that another rank is lost, so that it is not the cause of the failure."""
    # torch quotes NCCL's reason in the error about a communicator that it has aborted for it
    return find_out_of_memory(error) is None and distributed.is_lost_peer(error)


def run_rank(recipe: Recipe, folder: RunFolder, task: Task, launched: bool, restarts: bool = False) -> int:
    """Run a task as one rank.

    Args:
        restarts: whether, where there are ranks that do not train, ranks are started again when they are lost: each of
            those by itself, and all that train together, as often as the recipe says.

    The other arguments and the result are those of `run_process`.
    """
    if not (restarts and recipe.has_workers) or is_child():
        return run_process(recipe, folder, task, launched or is_child(), restarts)
    rank = launch_environment.rank()
    if rank not in recipe.role_ranks["train"]:
        return run_serving_rank(recipe, folder, launched)
    if recipe.run.max_restarts:
        return run_training_rank(recipe, folder, launched)
    return run_process(recipe, folder, task, launched, restarts)
