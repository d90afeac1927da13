"""Writes the checkpoints of a run when they are due, removes old ones, and resumes from the last intact one.

`Progress` is what a checkpoint holds besides models: how far a run has come, and the state of what adapts itself.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hybrid3d.config import Run
from hybrid3d.distributed import broadcast_object
from hybrid3d.run.folder import checkpoint_folder, checkpoint_steps
from hybrid3d.run.identity import RunIdentity
from hybrid3d.run.logger import RunLogger
from hybrid3d.storage.disk import MOUNTS, CheckpointWriteError, file_system_warning, free_bytes, free_inodes
from hybrid3d.storage.manifest import (
    BrokenCheckpoint,
    ForeignCheckpoint,
    UnusableCheckpoint,
    list_files,
    total_bytes,
)
from hybrid3d.train.megatron import checkpoint
from hybrid3d.train.trained_model import TrainedModels
from hybrid3d.train.writing import CheckpointWriter, remove, remove_unfinished

EXTRA_INODES = 2  # of a checkpoint, besides its files: its folder and its manifest


@dataclass(frozen=True)
class Progress:
    """How far a run has come. A run that begins has the defaults.

    Attributes:
        batch: number of the first batch of prompts that was not drawn yet.
        unfinished: places of the prompts that were drawn before and are not trained yet, of partial rollouts.
        kl, guard: the state of the KL coefficient, and of the guard.
        control: the settings that were changed so far, and the file of changes as it was read last.
    """

    batch: int = 0
    unfinished: tuple[tuple[int, int], ...] = ()
    kl: Mapping[str, Any] = field(default_factory=dict)
    guard: Mapping[str, Any] = field(default_factory=dict)
    control: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Progress:
        """Return what a checkpoint says; those of fine-tuning on data have no prompts and no KL."""
        unfinished = tuple((batch, place) for batch, place in saved.get("unfinished", ()))
        others = {key: saved[key] for key in ("batch", "kl", "guard", "control") if key in saved}
        return cls(unfinished=unfinished, **others)

    def as_json(self) -> dict[str, Any]:
        """Return what a checkpoint says."""
        return asdict(self)

    @property
    def learner(self) -> dict[str, Any]:
        """The part that a recorded step says: that of the learner."""
        return {"kl": self.kl, "guard": self.guard}


class Checkpoints:
    """Saves the models and progress of a run, and loads the last intact checkpoint. All ranks make all calls together.

    Attributes:
        identity: of the run, on the first rank; checkpoints of another run are refused, and new ones get it.
    """

    def __init__(
        self,
        models: TrainedModels,
        record: RunLogger,
        group: dist.ProcessGroup,
        identity: RunIdentity | None = None,
        sharding: str = checkpoint.FULLY_RESHARDABLE,
    ):
        """`group` has all ranks that hold shards of the models; `sharding` is as `run.optimizer_sharding` names it."""
        self.identity, self._sharding = identity, sharding
        self._models, self._record, self._group = models, record, group
        self._writing: CheckpointWriter | None = None
        self._updates = 0  # the number of updates before the checkpoint that is being written
        self._keep_last: int | None = None
        self._first_rank = group.rank() == 0

    def resume(self) -> tuple[int, Progress]:
        """Load the last intact checkpoint, if there is one, and rename broken ones.

        Returns:
            The policy's version, which is its number of updates, and the progress that was saved with it.
        """
        folder = self._record.folder
        if self._first_rank:
            self._check_file_system()
            remove_unfinished(folder.checkpoints)
        loaded = self._load_last_intact()
        updates, progress = loaded or (0, Progress())
        if self._first_rank:
            folder.truncate_records(updates)
        message = f"resumed from {checkpoint_folder(folder, updates)}" if loaded is not None else ""
        self._record.event("start" if loaded is None else "resume", message, step=updates)
        return updates, progress

    def _load_last_intact(self) -> tuple[int, Progress] | None:
        """Load the last intact checkpoint; return as `resume`, or None if there is no checkpoint.

        Raises:
            BrokenCheckpoint: there are checkpoints, but none is intact.
            UnusableCheckpoint: the last one cannot be used for a reason that the user can fix, such as that it is of
                another run.
        """
        folder = self._record.folder
        steps = self._steps()
        for step in reversed(steps):
            path = checkpoint_folder(folder, step)
            self._check_identity(path, step)
            try:
                return step, Progress.from_json(checkpoint.load(self._models, path, self._group))
            except UnusableCheckpoint:  # not renamed, because the user can fix the cause
                raise
            except BrokenCheckpoint as error:
                why = str(error)
            renamed = path.with_name(path.name + ".broken")
            if self._first_rank:
                shutil.rmtree(renamed, ignore_errors=True)
                path.rename(renamed)
            consequence = "the previous checkpoint is used" if step > steps[0] else "there is no earlier checkpoint"
            message = f"{why}: renamed to {renamed.name}; {consequence}"
            self._record.event("checkpoint_broken", message, step=step, path=str(renamed), why=why)
        if steps:
            raise BrokenCheckpoint(
                f"none of the {len(steps)} checkpoints in {folder.checkpoints} is intact: repair one and remove "
                ".broken from its name, or remove the run's folder to start from the beginning",
                raised_on_all_ranks=True,
            )
        return None

    def _check_identity(self, path: Path, step: int) -> None:
        """Check on the first rank that a checkpoint is of this run and step, and was written with its settings.

        If it is not, `ForeignCheckpoint` is raised on every rank.
        """
        problem, warning = None, ""
        if self.identity is not None:
            try:
                warning = self.identity.check(self._record.folder, path)
            except ForeignCheckpoint as error:
                problem = str(error)
            except BrokenCheckpoint:  # which loading reports
                pass
        problem = broadcast_object(problem, self._group)
        if problem is not None:
            raise ForeignCheckpoint(problem, raised_on_all_ranks=True)
        if warning:
            self._record.event("checkpoint_unidentified", warning, step=step, path=str(path))

    def save_if_due(self, updates: int, progress: Progress, run: Run) -> None:
        """Write a checkpoint if one is due after this many updates, and remove those that `run.keep_last` excludes.

        With `run.async_checkpoints` it is written in the background, and finished before the next one begins.

        Raises:
            CheckpointWriteError: this checkpoint or the previous one could not be written.
        """
        self._keep_last = run.keep_last
        if self._writing is not None and self._writing.is_written():
            self.close()
        every = run.checkpoint_every
        if updates == run.steps or (every and updates < run.steps and updates % every == 0):
            self.close()
            path = checkpoint_folder(self._record.folder, updates)
            self._check_free_space(path, updates)
            with self._recording_failure(path, updates):
                identity = self.identity.of_step(path, updates) if self.identity is not None else None
                self._writing = checkpoint.begin(
                    self._models, path, progress.as_json(), self._group, run.async_checkpoints, identity, self._sharding
                )
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
        """Finish the checkpoint that is being written; raise `CheckpointWriteError` if it could not be written."""
        if self._writing is None:
            return
        path, updates = self._writing.folder, self._updates
        with self._recording_failure(path, updates):
            self._writing.finish()
        self._writing = None
        self._record.event("checkpoint", step=updates, path=str(path))
        if self._keep_last and self._first_rank:
            for step in checkpoint_steps(self._record.folder)[: -self._keep_last]:
                path = checkpoint_folder(self._record.folder, step)
                try:
                    remove(path)
                except OSError as error:  # NFS, for example, keeps files that another process still reads
                    message = f"{path} could not be removed completely: {error.strerror}"
                    self._record.event("checkpoint_left", message, step=step, path=str(path), why=str(error))

    @contextmanager
    def _recording_failure(self, path: Path, updates: int) -> Iterator[None]:
        try:
            yield
        except CheckpointWriteError as error:
            with suppress(CheckpointWriteError):  # raised if the disk is too full for the event as well
                self._record.event("checkpoint_unwritten", step=updates, path=str(path), why=str(error))
            raise

    def _check_free_space(self, path: Path, updates: int) -> None:
        """Warn if the disk has less free space than the checkpoint will probably take."""
        earlier = self._steps()
        expected = 0 if earlier else checkpoint.bytes_expected(self._models, self._group)
        if not self._first_rank:  # one rank is enough for a file system that all share
            return
        last = checkpoint_folder(self._record.folder, earlier[-1]) if earlier else None
        required = total_bytes(last) if last is not None else expected
        files = len(list_files(last)) + EXTRA_INODES if last is not None else EXTRA_INODES
        free, inodes = free_bytes(path), free_inodes(path)
        if inodes is not None and files > inodes:
            message = f"{path} will have about {files} files and folders, but only {inodes} inodes are free on its disk"
            fields = {"wanted_inodes": files, "free_inodes": inodes, "wanted": required, "free": free}
            fix = "remove files, whatever their size, or lower run.keep_last"
            self._record.event("disk_low", f"{message}: {fix}", step=updates, path=str(path), **fields)
        elif required > free:
            message = (
                f"{path} will take about {required} bytes, but only {free} are free: free some, or lower run.keep_last"
            )
            self._record.event("disk_low", message, step=updates, path=str(path), wanted=required, free=free)

    def _steps(self) -> list[int]:
        """Return the steps with checkpoints that rank 0 sees; on a shared file system others may see them later."""
        steps: list[int] = broadcast_object(checkpoint_steps(self._record.folder), self._group)
        return steps

    def _check_file_system(self) -> None:
        if MOUNTS.exists():
            path = Path(os.path.realpath(self._record.folder.path))
            kind, message = file_system_warning(path, MOUNTS.read_text(encoding="utf-8"))
            if message:
                self._record.event("file_system", message, type=kind, path=str(path))
