"""A run's checkpoints: which are written when, which are kept, and from which one a run goes on."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hybrid3d import distributed
from hybrid3d.config import Recipe
from hybrid3d.run.record import Record
from hybrid3d.run.run_folder import checkpoint_folder, steps_in
from hybrid3d.storage.disk import CheckpointWriteError, free_bytes
from hybrid3d.storage.manifest import BrokenCheckpoint, UnusableCheckpoint, bytes_in
from hybrid3d.storage.mounts import MOUNTS, warning_of
from hybrid3d.train import checkpoint
from hybrid3d.train.writing import CheckpointWriter, remove, remove_unfinished


class Checkpoints:
    """Saves the models and the progress of a run, and finds the last that is whole. Every rank calls every method."""

    def __init__(self, recipe: Recipe, models: checkpoint.Models, record: Record):
        self._run, self._replicas = recipe.run, recipe.train.dp
        self._models = models
        self._record = record
        self._writing: CheckpointWriter | None = None
        self._updates = 0  # behind the checkpoint that is being written

    def adopt(self, recipe: Recipe) -> None:
        """Go on by the settings of this recipe."""
        self._run = recipe.run

    def resume(self) -> tuple[int, dict[str, Any]]:
        """Bring the models to the folder's last whole checkpoint, if there is one; what is broken is set aside.

        Returns:
            Updates that the policy has behind it, and the progress that was saved with it.
        """
        folder = self._record.folder
        updates, progress = 0, {}
        self._look_at_file_system()
        if distributed.rank() == 0:
            remove_unfinished(folder.checkpoints)
        loaded = self._load_last_whole()
        if loaded is not None:
            updates, progress = loaded
        if distributed.rank() == 0:
            folder.truncate(updates)
        said = f"resumed from {checkpoint_folder(folder, updates)}" if loaded is not None else ""
        self._record.event("start" if loaded is None else "resume", said, step=updates)
        return updates, progress

    def _load_last_whole(self) -> tuple[int, dict[str, Any]] | None:
        """Load the last checkpoint that is whole.

        Returns:
            The number of updates that it has behind it, and its progress; None where there is no checkpoint at all.

        Raises:
            BrokenCheckpoint: there are checkpoints, and none is whole.
            UnusableCheckpoint: the last cannot be used as it lies there, and shows no damage.
        """
        folder = self._record.folder
        steps = _of_first(steps_in(folder))
        for step in reversed(steps):
            path = checkpoint_folder(folder, step)
            try:
                return step, checkpoint.load(self._models, path)
            except UnusableCheckpoint:  # it would be lost to the user who can mend it, if it were set aside
                raise
            except BrokenCheckpoint as error:
                why = str(error)
            aside = path.with_name(path.name + ".broken")
            if distributed.rank() == 0:
                shutil.rmtree(aside, ignore_errors=True)
                path.rename(aside)
            then = "the one before is used" if step > steps[0] else "there is none before"
            said = f"{why}: set aside as {aside.name}, {then}"
            self._record.event("checkpoint_broken", said, step=step, path=str(aside), why=why)
        if steps:
            raise BrokenCheckpoint(
                f"none of the {len(steps)} checkpoints in {folder.checkpoints} is whole: mend one and take .broken off "
                "its name, or remove the run's folder to begin anew",
                raised_on_all_ranks=True,
            )
        return None

    def save_where_due(self, updates: int, progress: Mapping[str, Any]) -> None:
        """Write a checkpoint if the recipe wants one after so many updates, and drop those that it no longer keeps.

        One that is written beside training appears when it is complete, and is waited for when the next is due.

        Raises:
            Unwritten: one did not come to its end.
        """
        if self._writing is not None and self._writing.is_written():
            self.close()
        every = self._run.checkpoint_every
        if updates == self._run.steps or (every and updates < self._run.steps and updates % every == 0):
            self.close()
            path = checkpoint_folder(self._record.folder, updates)
            self._look_at_room(path, updates)
            with self._telling(path, updates):
                self._writing = checkpoint.begin(self._models, path, progress, self._run.async_checkpoints)
            self._updates = updates
            if not self._run.async_checkpoints:
                self.close()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Wait for what is being written, unless a rank is not there to."""
        if error is None or (
            getattr(error, "raised_on_all_ranks", False) and not isinstance(error, CheckpointWriteError)
        ):
            self.close()

    def close(self) -> None:
        """Wait for what is being written.

        Raises:
            Unwritten: it did not come to its end.
        """
        if self._writing is None:
            return
        path, updates = self._writing.folder, self._updates
        with self._telling(path, updates):
            self._writing.finish()
        self._writing = None
        self._record.event("checkpoint", step=updates, path=str(path))
        if self._run.keep_last and distributed.rank() == 0:
            for step in steps_in(self._record.folder)[: -self._run.keep_last]:
                self._remove(checkpoint_folder(self._record.folder, step), step)

    def _remove(self, path: Path, step: int) -> None:
        try:
            remove(path)
        except OSError as error:  # on NFS, as long as someone reads of its files
            said = f"{path} is left over, in part or whole: {error.strerror}"
            self._record.event("checkpoint_left", said, step=step, path=str(path), why=str(error))

    @contextmanager
    def _telling(self, path: Path, updates: int) -> Iterator[None]:
        try:
            yield
        except CheckpointWriteError as error:
            with suppress(
                CheckpointWriteError
            ):  # where there is no room for this line either, the error itself is what matters
                self._record.event("checkpoint_unwritten", step=updates, path=str(path), why=str(error))
            raise

    def _look_at_room(self, path: Path, updates: int) -> None:
        """Say beforehand that a checkpoint will hardly fit."""
        before = _of_first(steps_in(self._record.folder))
        if before:
            wanted = bytes_in(checkpoint_folder(self._record.folder, before[-1]))
        else:
            wanted = checkpoint.bytes_expected(self._models, self._replicas)
        free = free_bytes(path)
        if wanted > free:
            said = f"{path} will take about {wanted} bytes, and {free} are free: free some, or lower run.keep_last"
            self._record.event("disk_low", said, step=updates, path=str(path), wanted=wanted, free=free)

    def _look_at_file_system(self) -> None:
        if distributed.rank() == 0 and MOUNTS.exists():
            path = Path(os.path.realpath(self._record.folder.path))
            kind, said = warning_of(path, MOUNTS.read_text())
            if said:
                self._record.event("file_system", said, type=kind, path=str(path))


def _of_first(steps: list[int]) -> list[int]:
    """What rank 0 sees: on a shared file system others may see it later."""
    seen: list[int] = distributed.gather(steps)[0]
    return seen
