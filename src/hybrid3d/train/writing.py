"""Writes a checkpoint to the disk, completely or not at all, optionally while training continues."""

from __future__ import annotations

import json
import os
import queue
import re
import shutil
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from torch.distributed.checkpoint.api import CheckpointException

from hybrid3d.distributed import all_reduce_min, gather_objects
from hybrid3d.patches import apply
from hybrid3d.storage import manifest
from hybrid3d.storage.disk import CheckpointWriteError, describe_write_error, is_file_error
from hybrid3d.storage.manifest import Identity
from hybrid3d.train.megatron import patches
from hybrid3d.train.megatron.runtime import on_device
from hybrid3d.train.megatron.versions import SAVE_SETTINGS, WRITTEN_BY

PARTIAL = ".partial"  # suffix of a folder that is being written or removed

apply(patches.CHECKPOINT)

Result = TypeVar("Result")


class CheckpointWriter:
    """Writes one checkpoint. All ranks create it and call its methods together; only one may be unfinished at a time.

    Raises (by the constructor and by `finish`):
        CheckpointWriteError: the disk is full or fails. Partly written files are removed, existing checkpoints stay.
            Either all ranks raise it, or only one does, and the others report a lost rank.
    """

    def __init__(
        self,
        state: Callable[[], Mapping[str, Any]],
        folder: Path,
        documents: Mapping[str, Any],
        in_background: bool,
        group: dist.ProcessGroup,
        identity: Identity | None = None,
    ):
        """
        Args:
            state: returns the state dict that Megatron saves.
            folder: the checkpoint's folder, which gets this name when it is complete.
            documents: the rest of the checkpoint: JSON files by name.
            in_background: whether training continues meanwhile, so that copies in host memory are written.
            group: the ranks that write the checkpoint together.
            identity: which run and step the checkpoint is of; that of the first rank counts.
        """
        self.folder = folder
        self._identity = identity
        self._group = group
        self._unfinished = folder.with_name(folder.name + PARTIAL)
        self._crcs: dict[str, int] = {}
        self._failure: BaseException | None = None
        self._together(self._on_first_rank(self._create_folder))
        self._together(partial(self._begin, state, in_background))
        self._documents = {name: json.dumps(content) for name, content in documents.items()}
        self._together(self._on_first_rank(self._write_documents))
        self._thread = threading.Thread(target=self._write, name="checkpoint", daemon=True)
        self._thread.start()

    def is_written(self) -> bool:
        """Return whether all ranks have written their shards, so that `finish` does not wait."""
        return bool(all_reduce_min(int(not self._thread.is_alive()), self._group))

    def finish(self) -> None:
        """Wait until everything is written, and rename the folder to its final name."""
        self._thread.join()
        self._together(self._raise_failure)
        self._together(self._close)
        shares = self._together(self._file_crcs)
        self._together(self._on_first_rank(partial(self._publish, shares)))

    def _together(self, part: Callable[[], Result]) -> list[Result]:
        return together(self._unfinished, part, self._group)

    def _on_first_rank(self, act: Callable[[], Any]) -> Callable[[], None]:
        return lambda: act() if self._group.rank() == 0 else None

    def _create_folder(self) -> None:
        shutil.rmtree(self._unfinished, ignore_errors=True)
        self._unfinished.mkdir(parents=True)

    def _write_documents(self) -> None:
        for name, text in self._documents.items():
            (self._unfinished / name).write_text(text, encoding="utf-8")

    def _begin(self, state: Callable[[], Mapping[str, Any]], in_background: bool) -> None:
        """Plan with all ranks which files each writes, write small objects, and copy this rank's shards to the host."""
        patches.RESULTS.replace(queue.Queue())  # without results of a checkpoint that failed
        try:
            with on_device():
                request = dist_checkpointing.save(dict(state()), str(self._unfinished), **SAVE_SETTINGS)
                self._request, self._arguments = request, list(request.async_fn_args)
                if request.preload_fn is not None:
                    shards = request.preload_fn()
                    self._arguments[1] = _copied(shards, self._arguments[1]) if in_background else shards
        except Exception as error:  # not torch's of a failure on any rank, which is no `Exception`
            if not is_file_error(error):
                raise
            # Only this rank writes the file. The others wait in a collective, and exit when this rank does.
            why = describe_write_error(self._unfinished, error)
            shutil.rmtree(self._unfinished, ignore_errors=True)
            raise CheckpointWriteError(why) from error

    def _write(self) -> None:
        """Write this rank's shards; runs in a thread, beside training."""
        try:
            if self._request.async_fn is not None:
                _, buckets, results = self._arguments
                results.put(_write_buckets(self._request.async_fn.args[0], buckets))
            self._crcs = self._file_crcs()
        except BaseException as error:  # `finish` raises it
            self._failure = error

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _close(self) -> None:
        with on_device():
            for finalize in self._request.finalize_fns:
                finalize()

    def _file_crcs(self) -> dict[str, int]:
        """Return the CRC-32 of each file that this rank has written, by name."""
        local = [name for name in manifest.list_files(self._unfinished) if _writer_of(name) == self._group.rank()]
        return self._crcs | {n: manifest.fsync_and_crc(self._unfinished / n) for n in local if n not in self._crcs}

    def _publish(self, shares: list[dict[str, int]]) -> None:
        """Write the manifest, and rename the folder to its final name."""
        crcs = {name: crc for share in shares for name, crc in share.items()}
        manifest.write(self._unfinished, crcs, self._identity, WRITTEN_BY)
        manifest.fsync_folder(self._unfinished)
        with suppress(OSError):  # a folder that is removed only in part has another name
            remove(self.folder)
        os.rename(self._unfinished, self.folder)
        manifest.fsync_folder(self.folder.parent)


def remove(folder: Path) -> None:
    """Remove a checkpoint if it is there; it is renamed first, so that a partial one never looks complete."""
    if folder.exists():
        removed = folder.with_name(folder.name + ".old" + PARTIAL)
        shutil.rmtree(removed, ignore_errors=True)
        os.rename(folder, removed)
        shutil.rmtree(removed)


def remove_unfinished(folder: Path) -> None:
    """Remove what a killed run was writing or removing in a folder of checkpoints."""
    for path in folder.glob(f"*{PARTIAL}"):
        shutil.rmtree(path, ignore_errors=True)


def together(folder: Path, part: Callable[[], Result], group: dist.ProcessGroup) -> list[Result]:
    """Run each rank's part of writing a folder; return the results of all ranks, by rank, on every rank.

    Raises:
        CheckpointWriteError: on every rank, if writing failed on any rank; the folder is removed.
    """
    result, why, cause = None, None, None
    try:
        result = part()
    except (OSError, CheckpointException) as error:
        why, cause = describe_write_error(folder, error), error
    outcomes = gather_objects((result, why), group)
    first = next((why for _, why in outcomes if why), None)
    if first is None:
        return [result for result, _ in outcomes]
    if group.rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
    dist.barrier(group)
    raise CheckpointWriteError(first, raised_on_all_ranks=True) from cause


def _write_buckets(transforms: list[Any], buckets: list[Any]) -> dict[int, Any]:
    """Write each bucket, a file, in a thread of its own; return Megatron's results by the bucket's number.

    Megatron's function that writes all of them loses what kind of error a bucket had, or forks processes.

    Raises:
        OSError: one of them cannot be written; torch's error, which may be another, is the cause then.
    """
    # Its decorator, for forked processes, would turn Python's collection of garbage off in the whole rank
    write_bucket = FileSystemWriterAsync.write_preloaded_data.__wrapped__

    def write(number: int) -> Any:
        results, count = queue.Queue[Any](), queue.Queue[int]()
        count.put(number)
        write_bucket(transforms, number, buckets[number], results, count, True)
        _, result = results.get()
        if not isinstance(result, Exception):
            return result
        if is_file_error(result) and not isinstance(result, OSError):
            raise OSError(f"{type(result).__name__}: {result}") from result
        raise result

    with ThreadPoolExecutor(len(buckets), thread_name_prefix="checkpoint") as threads:
        return dict(enumerate(threads.map(write, range(len(buckets)))))


def _copied(shards: list[Any], originals: list[Any]) -> list[Any]:
    """Return copies of shards on the host: without a GPU the shards are the training tensors themselves."""
    held = {id(tensor) for _, _, (_, tensors) in originals for _, tensor in tensors}
    return [
        (file, key, (data, [(item, tensor.clone() if id(tensor) in held else tensor) for item, tensor in tensors]))
        for file, key, (data, tensors) in shards
    ]


def _writer_of(name: str) -> int:
    """Return the rank that wrote a file; on a shared file system other ranks may not see it yet."""
    shard_file = re.match(r"__(\d+)_", name)
    return int(shard_file[1]) if shard_file else 0
