"""A checkpoint on its way to the disk: made whole or not at all, at once or beside training."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import queue
import re
import shutil
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from torch.distributed.checkpoint.api import CheckpointException

from hybrid3d.distributed import gather_objects
from hybrid3d.process import kill_when_parent_exits
from hybrid3d.storage import manifest
from hybrid3d.storage.disk import CheckpointWriteError, is_of_files, why_unwritten
from hybrid3d.storage.manifest import PROGRESS
from hybrid3d.train.runtime import on_device

BEGUN_SECONDS = 10  # in which a process that writes has begun
BEGUN_TRIES = 6
PARTIAL = ".partial"  # ends the name of a folder that is being written, or removed

Result = TypeVar("Result")


class CheckpointWriter:
    """One checkpoint. Every rank makes it, and calls its methods, together; another is begun when it is finished.

    Raises (when made, and by `finish`):
        CheckpointWriteError: there is no room, or the disk fails. Nothing half-written stays, what was there before
            does. Ranks raise it together, or one does whose end the others notice.
    """

    def __init__(
        self,
        state: Callable[[], Mapping[str, Any]],
        folder: Path,
        progress: Mapping[str, Any],
        beside: bool,
        group: dist.ProcessGroup,
    ):
        """
        Args:
            state: makes what Megatron saves.
            folder: which appears under its name when it is complete.
            progress: what else a run must know to go on, as JSON.
            beside: training goes on meanwhile, so copies in the host's memory are written.
            group: the ranks that write it together.
        """
        self.folder = folder
        self._group = group
        self._unfinished = folder.with_name(folder.name + PARTIAL)
        self._own: dict[str, int] = {}
        self._failure: BaseException | None = None
        self._together(self._by_first(self._make))
        self._together(partial(self._begin, state, beside))
        told = json.dumps(dict(progress))
        self._together(self._by_first(lambda: (self._unfinished / PROGRESS).write_text(told)))
        self._thread = threading.Thread(target=self._write, name="checkpoint", daemon=True)
        self._thread.start()

    def is_written(self) -> bool:
        """Whether all ranks have written their shards, so that `finish` need not wait."""
        left = torch.tensor(int(self._thread.is_alive()))
        dist.all_reduce(left, group=self._group)
        return int(left) == 0

    def finish(self) -> None:
        """Wait until all is written, and give the folder its name."""
        self._thread.join()
        self._together(self._tell_failure)
        self._together(self._close)
        shares = self._together(self._sums)
        self._together(self._by_first(partial(self._name, shares)))

    def _together(self, part: Callable[[], Result]) -> list[Result]:
        return together(self._unfinished, part, self._group)

    def _by_first(self, act: Callable[[], Any]) -> Callable[[], None]:
        return lambda: act() if self._group.rank() == 0 else None

    def _make(self) -> None:
        shutil.rmtree(self._unfinished, ignore_errors=True)
        self._unfinished.mkdir(parents=True)

    def _begin(self, state: Callable[[], Mapping[str, Any]], beside: bool) -> None:
        """Agree on who writes what, write what is small, and bring what this rank writes to the host."""
        filesystem_async._results_queue = queue.Queue()  # nothing of a checkpoint that failed is left in it
        try:
            with on_device():
                request = dist_checkpointing.save(dict(state()), str(self._unfinished), async_sharded_save=True)
                self._request, self._arguments = request, list(request.async_fn_args)
                if request.preload_fn is not None:
                    shards = request.preload_fn()
                    self._arguments[1] = _copied(shards, self._arguments[1]) if beside else shards
        except CheckpointException:
            raise
        except Exception as error:
            if not is_of_files(error):
                raise
            # Of a file that this rank alone writes, while the others are in a collective: they end with it
            why = why_unwritten(self._unfinished, error)
            shutil.rmtree(self._unfinished, ignore_errors=True)
            raise CheckpointWriteError(why) from error

    def _write(self) -> None:
        """In a thread, which waits for the processes that write."""
        try:
            if self._request.async_fn is not None:
                self._request.async_fn(*self._arguments, **self._request.async_fn_kwargs)
            self._own = self._sums()
        except BaseException as error:  # told by `finish`
            self._failure = error

    def _tell_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _close(self) -> None:
        with on_device():
            for finalize in self._request.finalize_fns:
                finalize()

    def _sums(self) -> dict[str, int]:
        """Of the files that this rank has written, the CRCs that are not known yet, and those that are."""
        mine = [name for name in manifest.names_in(self._unfinished) if _writer_of(name) == self._group.rank()]
        return self._own | {n: manifest.crc_of(self._unfinished / n) for n in mine if n not in self._own}

    def _name(self, shares: list[dict[str, int]]) -> None:
        manifest.write(self._unfinished, {name: crc for share in shares for name, crc in share.items()})
        manifest.sync_folder(self._unfinished)
        with suppress(OSError):  # under another name it is in no one's way
            remove(self.folder)
        os.rename(self._unfinished, self.folder)
        manifest.sync_folder(self.folder.parent)


def remove(folder: Path) -> None:
    """Remove a checkpoint, if it is there, under another name: what is half gone does not look whole."""
    if folder.exists():
        going = folder.with_name(folder.name + ".old" + PARTIAL)
        shutil.rmtree(going, ignore_errors=True)
        os.rename(folder, going)
        shutil.rmtree(going)


def remove_unfinished(folder: Path) -> None:
    """Remove what a run that was killed was just writing or removing in a folder of checkpoints."""
    for path in folder.glob(f"*{PARTIAL}"):
        shutil.rmtree(path, ignore_errors=True)


def together(folder: Path, part: Callable[[], Result], group: dist.ProcessGroup) -> list[Result]:
    """Do each rank's part in writing a folder; return what the parts return, by rank, on every rank.

    Raises:
        CheckpointWriteError: on every rank, where the disk failed one; the folder is removed.
    """
    result, why, cause = None, None, None
    try:
        result = part()
    except (OSError, CheckpointException) as error:
        why, cause = why_unwritten(folder, error), error
    outcomes = gather_objects((result, why), group)
    first = next((why for _, why in outcomes if why), None)
    if first is None:
        return [given for given, _ in outcomes]
    if group.rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
    dist.barrier(group)
    raise CheckpointWriteError(first, raised_on_all_ranks=True) from cause


def _copied(shards: list[Any], originals: list[Any]) -> list[Any]:
    """Shards as they are now: without a GPU, what was brought to the host is what is trained."""
    held = {id(tensor) for _, _, (_, tensors) in originals for _, tensor in tensors}
    return [
        (file, key, (data, [(item, tensor.clone() if id(tensor) in held else tensor) for item, tensor in tensors]))
        for file, key, (data, tensors) in shards
    ]


def _writer_of(name: str) -> int:
    """The rank that wrote a file: on a shared file system it may be the only one that sees it already."""
    of_shards = re.match(r"__(\d+)_", name)
    return int(of_shards[1]) if of_shards else 0


def _by_processes(transforms: list[Any], msc: bool, rank: int, buckets: list[Any], results: queue.Queue[Any]) -> None:
    """Write each bucket, a file, by a forked process, so that training keeps the interpreter to itself.

    The arguments are those of Megatron's, which it stands in for.
    """
    begun, written = [], {}
    try:
        for number, bucket in enumerate(buckets):
            begun.append(_begun(transforms, number, bucket))
        for number, (process, ours) in enumerate(begun):
            try:
                written[number] = ours.recv()
            except (EOFError, OSError):  # killed before it spoke, or while it did
                process.join()
                file = buckets[number][0]
                written[number] = OSError(f"the process that wrote {file} ended with code {process.exitcode}")
    finally:
        for process, ours in begun:
            ours.close()  # whoever is still telling is not heard any more
            process.join()
    results.put(next((one for one in written.values() if isinstance(one, Exception)), written))


def _begun(transforms: list[Any], number: int, bucket: Any) -> tuple[ForkProcess, Connection]:
    """A process that writes a bucket, and where it tells what became of it.

    The fork of a rank with threads may never come to its first line: a lock was another thread's when it was forked, as
    in CPython 3.11 that of the list of threads (https://github.com/python/cpython/issues/112275). It has done nothing
    yet, so another is begun.
    """
    context = multiprocessing.get_context("fork")
    for _ in range(BEGUN_TRIES):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_write_bucket, args=(os.getpid(), transforms, number, bucket, theirs))
        process.start()
        theirs.close()
        if ours.poll(BEGUN_SECONDS):
            with suppress(EOFError, OSError):  # it has been killed, as whoever listens next will find
                ours.recv()
            return process, ours
        process.kill()
        process.join()
        ours.close()
    raise OSError(f"no process to write {bucket[0]} has begun in {BEGUN_TRIES} x {BEGUN_SECONDS} seconds")


def _write_bucket(rank: int, transforms: list[Any], number: int, bucket: Any, told: Connection) -> None:
    kill_when_parent_exits(rank)  # in whose memory it is, that of a GPU too
    told.send("begun")
    gc.disable()  # garbage of the rank's own may lie on its GPU, which a fork must not touch
    results, count = queue.Queue[Any](), queue.Queue[int]()
    count.put(number)
    filesystem_async.FileSystemWriterAsync.write_preloaded_data(transforms, number, bucket, results, count, True)
    _, result = results.get()
    if isinstance(result, Exception) and not isinstance(result, OSError):
        result = OSError(f"{type(result).__name__}: {result}")  # what others raise may not survive the pipe
    told.send(result)


# Megatron's own waits without end for a writer that is killed. And what is written it tells to a process beside each
# rank, which lives on after a rank that is killed: a queue within the rank, made for each checkpoint, is in its place.
filesystem_async.FileSystemWriterAsync.write_preloaded_data_multiproc = staticmethod(_by_processes)
