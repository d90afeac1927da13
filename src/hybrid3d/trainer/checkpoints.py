"""A run's checkpoints: when they are written, which are kept, and from which one a run resumes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hybrid3d.config import Run
from hybrid3d.distributed import broadcast_object
from hybrid3d.run.record import Record
from hybrid3d.run.run_folder import checkpoint_folder, checkpoint_steps
from hybrid3d.storage.disk import CheckpointWriteError, free_bytes
from hybrid3d.storage.manifest import BrokenCheckpoint, UnusableCheckpoint, total_bytes
from hybrid3d.storage.mounts import MOUNTS, file_system_warning
from hybrid3d.train import checkpoint
from hybrid3d.train.writing import CheckpointWriter, remove, remove_unfinished


class Checkpoints:
    """Saves models and progress of a run, and loads the last intact checkpoint. Every rank calls every method."""

    def __init__(self, models: checkpoint.Models, replicas: int, record: Record, group: dist.ProcessGroup):
        """
        Args:
            replicas: the data-parallel size, all of which have the same weights.
            group: the ranks that have shards of the models.
        """
        self._models, self._replicas, self._group = models, replicas, group
        self._record = record
        self._writing: CheckpointWriter | None = None
        self._updates = 0  # behind the checkpoint that is being written
        self._keep_last: int | None = None
        self._first_rank = group.rank() == 0

    def resume(self) -> tuple[int, dict[str, Any]]:
        """Load the folder's last intact checkpoint, if there is one; broken ones are set aside.

        Returns:
            The policy's version (its number of updates), and the progress that was saved with it.
        """
        folder = self._record.folder
        updates, progress = 0, {}
        self._check_file_system()
        if self._first_rank:
            remove_unfinished(folder.checkpoints)
        loaded = self._load_last_intact()
        if loaded is not None:
            updates, progress = loaded
        if self._first_rank:
            folder.truncate_records(updates)
        message = f"resumed from {checkpoint_folder(folder, updates)}" if loaded is not None else ""
        self._record.event("start" if loaded is None else "resume", message, step=updates)
        return updates, progress

    def _load_last_intact(self) -> tuple[int, dict[str, Any]] | None:
        """Load the last intact checkpoint.

        Returns:
            The number of updates behind it, and its progress; None if there is no checkpoint.

        Raises:
            BrokenCheckpoint: there are checkpoints, and none is intact.
            UnusableCheckpoint: the last cannot be read, and shows no damage.
        """
        folder = self._record.folder
        steps = self._steps()
        for step in reversed(steps):
            path = checkpoint_folder(folder, step)
            try:
                return step, checkpoint.load(self._models, path, self._group)
            except UnusableCheckpoint:  # not set aside, because its owner can repair it
                raise
            except BrokenCheckpoint as error:
                why = str(error)
            aside = path.with_name(path.name + ".broken")
            if self._first_rank:
                shutil.rmtree(aside, ignore_errors=True)
                path.rename(aside)
            then = "the one before is used" if step > steps[0] else "there is none before"
            message = f"{why}: set aside as {aside.name}, {then}"
            self._record.event("checkpoint_broken", message, step=step, path=str(aside), why=why)
        if steps:
            raise BrokenCheckpoint(
                f"none of the {len(steps)} checkpoints in {folder.checkpoints} is whole: mend one and take .broken off "
                "its name, or remove the run's folder to begin anew",
                raised_on_all_ranks=True,
            )
        return None

    def save_if_due(self, updates: int, progress: Mapping[str, Any], run: Run) -> None:
        """Write a checkpoint if one is due after so many updates, and remove those that are not kept.

        With `run.async_checkpoints` it is written in the background, and finished before the next one begins.

        Raises:
            CheckpointWriteError: one could not be written.
        """
        self._keep_last = run.keep_last
        if self._writing is not None and self._writing.is_written():
            self.close()
        every = run.checkpoint_every
        if updates == run.steps or (every and updates < run.steps and updates % every == 0):
            self.close()
            path = checkpoint_folder(self._record.folder, updates)
            self._check_disk_room(path, updates)
            with self._recording_failure(path, updates):
                self._writing = checkpoint.begin(self._models, path, progress, self._group, run.async_checkpoints)
            self._updates = updates
            if not run.async_checkpoints:
                self.close()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Finish the checkpoint that is being written, unless another rank has failed."""
        if error is None or (
            getattr(error, "raised_on_all_ranks", False) and not isinstance(error, CheckpointWriteError)
        ):
            self.close()

    def close(self) -> None:
        """Finish the checkpoint that is being written.

        Raises:
            CheckpointWriteError: it could not be written.
        """
        if self._writing is None:
            return
        path, updates = self._writing.folder, self._updates
        with self._recording_failure(path, updates):
            self._writing.finish()
        self._writing = None
        self._record.event("checkpoint", step=updates, path=str(path))
        if self._keep_last and self._first_rank:
            for step in checkpoint_steps(self._record.folder)[: -self._keep_last]:
                self._remove(checkpoint_folder(self._record.folder, step), step)

    def _remove(self, path: Path, step: int) -> None:
        try:
            remove(path)
        except OSError as error:  # on NFS, as long as someone reads of its files
            message = f"{path} is left over, in part or whole: {error.strerror}"
            self._record.event("checkpoint_left", message, step=step, path=str(path), why=str(error))

    @contextmanager
    def _recording_failure(self, path: Path, updates: int) -> Iterator[None]:
        try:
            yield
        except CheckpointWriteError as error:
            with suppress(
                CheckpointWriteError
            ):  # where there is no room for this line either, the error itself is what matters
                self._record.event("checkpoint_unwritten", step=updates, path=str(path), why=str(error))
            raise

    def _check_disk_room(self, path: Path, updates: int) -> None:
        """Warn if the disk has less room than the checkpoint will probably take."""
        before = self._steps()
        if before:
            wanted = total_bytes(checkpoint_folder(self._record.folder, before[-1]))
        else:
            wanted = checkpoint.bytes_expected(self._models, self._replicas, self._group)
        free = free_bytes(path)
        if wanted > free:
            message = f"{path} will take about {wanted} bytes, and {free} are free: free some, or lower run.keep_last"
            self._record.event("disk_low", message, step=updates, path=str(path), wanted=wanted, free=free)

    def _steps(self) -> list[int]:
        """Return the steps that the first rank sees: on a shared file system others may see them later."""
        return broadcast_object(checkpoint_steps(self._record.folder), self._group)

    def _check_file_system(self) -> None:
        if self._first_rank and MOUNTS.exists():
            path = Path(os.path.realpath(self._record.folder.path))
            kind, message = file_system_warning(path, MOUNTS.read_text())
            if message:
                self._record.event("file_system", message, type=kind, path=str(path))
