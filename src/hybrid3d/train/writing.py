"""A checkpoint on its way to the disk: made whole or not at all, at once or beside training."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from torch.distributed.checkpoint.api import CheckpointException

from hybrid3d.distributed import gather_objects
from hybrid3d.patches import apply
from hybrid3d.storage import manifest
from hybrid3d.storage.disk import CheckpointWriteError, describe_write_error, is_file_error
from hybrid3d.storage.manifest import PROGRESS
from hybrid3d.train import patches
from hybrid3d.train.runtime import on_device

PARTIAL = ".partial"  # ends the name of a folder that is being written, or removed

apply(patches.CHECKPOINT)

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
        self._crcs: dict[str, int] = {}
        self._failure: BaseException | None = None
        self._together(self._by_first(self._make))
        self._together(partial(self._begin, state, beside))
        told = json.dumps(dict(progress))
        self._together(self._by_first(lambda: (self._unfinished / PROGRESS).write_text(told)))
        self._thread = threading.Thread(target=self._write, name="checkpoint", daemon=True)
        self._thread.start()

    def is_written(self) -> bool:
        """Return whether all ranks have written their shards, so that `finish` does not wait."""
        left = torch.tensor(int(self._thread.is_alive()))
        dist.all_reduce(left, group=self._group)
        return int(left) == 0

    def finish(self) -> None:
        """Wait until everything is written, and rename the folder to its final name."""
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
        """Plan with all ranks who writes what, write small objects, and copy this rank's shards to the host."""
        patches.new_results_queue()  # without results of a checkpoint that failed
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
            if not is_file_error(error):
                raise
            # Of a file that this rank alone writes, while the others are in a collective: they end with it
            why = describe_write_error(self._unfinished, error)
            shutil.rmtree(self._unfinished, ignore_errors=True)
            raise CheckpointWriteError(why) from error

    def _write(self) -> None:
        """Write this rank's shards; runs in a thread, which waits for the processes that write."""
        try:
            if self._request.async_fn is not None:
                self._request.async_fn(*self._arguments, **self._request.async_fn_kwargs)
            self._crcs = self._sums()
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
        """Return the CRC-32 of each file that this rank has written, by name."""
        local = [name for name in manifest.list_files(self._unfinished) if _writer_of(name) == self._group.rank()]
        return self._crcs | {n: manifest.fsync_and_crc(self._unfinished / n) for n in local if n not in self._crcs}

    def _name(self, shares: list[dict[str, int]]) -> None:
        manifest.write(self._unfinished, {name: crc for share in shares for name, crc in share.items()})
        manifest.fsync_folder(self._unfinished)
        with suppress(OSError):  # under another name it is in no one's way
            remove(self.folder)
        os.rename(self._unfinished, self.folder)
        manifest.fsync_folder(self.folder.parent)


def remove(folder: Path) -> None:
    """Remove a checkpoint if it is there; it is renamed first, so that a partial one never looks complete."""
    if folder.exists():
        going = folder.with_name(folder.name + ".old" + PARTIAL)
        shutil.rmtree(going, ignore_errors=True)
        os.rename(folder, going)
        shutil.rmtree(going)


def remove_unfinished(folder: Path) -> None:
    """Remove what a killed run was writing or removing in a folder of checkpoints."""
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
        why, cause = describe_write_error(folder, error), error
    outcomes = gather_objects((result, why), group)
    first = next((why for _, why in outcomes if why), None)
    if first is None:
        return [given for given, _ in outcomes]
    if group.rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
    dist.barrier(group)
    raise CheckpointWriteError(first, raised_on_all_ranks=True) from cause


def _copied(shards: list[Any], originals: list[Any]) -> list[Any]:
    """Return copies of shards on the host: without a GPU they are the tensors that are trained."""
    held = {id(tensor) for _, _, (_, tensors) in originals for _, tensor in tensors}
    return [
        (file, key, (data, [(item, tensor.clone() if id(tensor) in held else tensor) for item, tensor in tensors]))
        for file, key, (data, tensors) in shards
    ]


def _writer_of(name: str) -> int:
    """Return the rank that wrote a file: on a shared file system others may not see it yet."""
    of_shards = re.match(r"__(\d+)_", name)
    return int(of_shards[1]) if of_shards else 0
