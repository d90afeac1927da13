"""What one rank does from start to end: its log, its task, and its last words when it fails."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich.console import Console

from hybrid3d import distributed
from hybrid3d.config import Recipe
from hybrid3d.launch import rendezvous
from hybrid3d.process import (
    adopt_orphans,
    kill_descendants,
    kill_when_parent_exits,
    remove_shared_memory,
    set_shared_memory_prefix,
)
from hybrid3d.run import terminal
from hybrid3d.run.heartbeat import Heartbeat
from hybrid3d.run.oom_recovery import OutOfMemoryRestart
from hybrid3d.run.run_folder import RunFolder

logger = logging.getLogger(__name__)

Task = Callable[[int, dist.Store, "Console | None"], None]
"""A rank's work: given its number, a store that all ranks have met at, and a console where it is the one that speaks.

It begins by building the default process group through the store.
"""


def run_rank(recipe: Recipe, folder: RunFolder, task: Task, launched: bool) -> int:
    """Run a task as one rank; 0 when it ended well, 2 where the ranks were not started alike, 1 where it failed.

    The rank's own output and that of every library goes to its log. What it fails of is written, in one line, to
    where the launcher looks; a rank that is not the first to fail mostly fails of its lost peer.

    Args:
        launched: by our own launcher, which says why a rank failed; under torchrun and srun the rank says it.
    """
    kill_when_parent_exits(os.getppid())  # the launcher: a rank must not live on where that is killed
    adopt_orphans()  # what a reward has started whose pool it has killed
    rank = distributed.rank()
    folder.logs.mkdir(parents=True, exist_ok=True)
    folder.failure_path(rank).unlink(missing_ok=True)
    # Where NCCL's flight recorder writes what each rank was doing when a collective hung; it appends the rank
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(folder.logs / "nccl-rank-"))
    stderr = terminal.plain_console(file=os.fdopen(os.dup(2), "w"))
    console = _redirect(folder.log_path(rank), speaks=rank == 0)
    _log_as(rank)
    try:
        store = rendezvous.meet(rendezvous.rank_record(recipe))
    except rendezvous.RendezvousError as error:
        logger.error("%s", error)
        if not error.said and distributed.local_rank() == 0:
            _say(stderr, f"{recipe.name}: {error}")
        return error.code
    set_shared_memory_prefix(distributed.run_id())

    def lost(other: int, said: str) -> None:
        """Another rank does not answer: tell why the run ends, and clean up, because this process ends too."""
        with suppress(OSError):  # the disk of its log may be full
            logger.error("rank %d: %s", other, said)
        reason = {"rank": other, "time": time.time(), "peer": False, "reason": said, "kind": "error"}
        try:
            told = _leave(folder.failure_path(other), reason, first=True) and launched
        except FileExistsError:  # it has said itself why it ends, or another rank has told this before
            told = True
        if not told:
            _say(stderr, failure_message(folder, other, reason))
        remove_shared_memory(distributed.run_id())

    try:
        heartbeat = Heartbeat(store, rank, distributed.world_size(), lost)
        task(rank, store, console)
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
        heartbeat.stop()
        kill_descendants()
        return 0
    # The boundary of the process: everything is reported, nothing goes on. SystemExit is no Exception, nor is what
    # PyTorch raises of checkpoints.
    except BaseException as error:
        on_all_ranks = getattr(error, "raised_on_all_ranks", False)
        reason = {"rank": rank, "time": time.time(), "peer": _is_lost_peer(error), "reason": _one_line(error)}
        if on_all_ranks:
            reason |= {"peer": False, "on_all_ranks": True, "reason": str(error)}
        reason["kind"] = "out_of_memory" if isinstance(error, OutOfMemoryRestart) else "error"
        told = _leave(folder.failure_path(rank), reason) and launched
        if not told and not reason["peer"] and (rank == 0 or not on_all_ranks):
            _say(stderr, failure_message(folder, rank, reason))
        try:
            with suppress(OSError):  # the disk of its log may be full
                traceback.print_exception(error)
                sys.stderr.flush()
            kill_descendants()
            remove_shared_memory(distributed.run_id())
        finally:
            os._exit(1)  # communication threads may be waiting for ranks that are gone


def failure_message(folder: RunFolder, rank: int, reason: Mapping[str, Any]) -> str:
    """Why a run has ended, by the reason that a rank gave: its own, or one that all ranks came to together."""
    if reason.get("on_all_ranks"):
        return f"stopped: {reason['reason']}"
    return f"rank {rank} failed: {reason['reason']}\nits log: {folder.log_path(rank)}"


def _leave(path: Path, reason: Mapping[str, Any], first: bool = False) -> bool:
    """Leave a reason where the launcher looks; False where the disk is full.

    Raises:
        FileExistsError: it must be the `first`, and there is one.
    """
    # The launcher looks at any moment, and is to see all of it or nothing
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        draft.write_text(json.dumps(reason))
        if first:
            os.link(draft, path)
        else:
            draft.replace(path)
        return True
    except FileExistsError:
        raise
    except OSError:
        return False
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)


def _say(console: Console, message: str) -> None:
    console.print(message, style="red", highlight=False, markup=False, soft_wrap=True)


def _log_as(rank: int) -> None:
    """Have hybrid3d's loggers write to this rank's log, each line with the rank in it."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter(f"%(asctime)s rank {rank} %(levelname)s %(name)s: %(message)s"))
    package = logging.getLogger("hybrid3d")
    package.handlers, package.propagate = [handler], False
    package.setLevel(logging.INFO)


def _redirect(log: Path, speaks: bool) -> Console | None:
    """Send stdout and stderr, those of C++ included, to the log; the rank that speaks keeps the terminal for itself."""
    kept = os.fdopen(os.dup(1), "w") if speaks else None
    sys.stdout.flush()
    sys.stderr.flush()
    opened = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(opened, 1)
    os.dup2(opened, 2)
    os.close(opened)
    return terminal.plain_console(file=kept) if kept else None


# What gloo, and NCCL through torch's ProcessGroupNCCL, say on a rank that has lost another
LOST_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "gloo/transport",
    "ncclRemoteError",
    "remote process exited",
    "communicator was aborted",
    "Watchdog caught collective operation timeout",
)


def _is_lost_peer(error: BaseException) -> bool:
    """Return whether an error is that of a rank that has lost another, and not the cause of the run's end."""
    if isinstance(error, dist.DistError) and not isinstance(error, dist.DistBackendError):
        return True  # of the store or the network
    return any(sign in str(error) for sign in LOST_PEER)  # NCCL's other errors are this rank's own


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
