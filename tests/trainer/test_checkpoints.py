"""A run's checkpoints: what is waited for, and what is set aside, stays or is removed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from hybrid3d.config import Run, load_recipe
from hybrid3d.inputs.completions import EndpointError
from hybrid3d.run.folder import RunFolder, checkpoint_folder
from hybrid3d.run.logger import Display, RunLogger
from hybrid3d.storage.disk import CheckpointWriteError
from hybrid3d.storage.manifest import UnusableCheckpoint
from hybrid3d.train.megatron import checkpoint
from hybrid3d.trainer import checkpoints as trainer_checkpoints
from hybrid3d.trainer.checkpoints import Checkpoints, Progress
from hybrid3d.trainer.start import training_ranks_here
from run_ranks import ROOT

pytestmark = pytest.mark.engines


class Written:
    """Stands for a `CheckpointWriter`."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.finished = 0

    def is_written(self) -> bool:
        return False

    def finish(self) -> None:
        self.finished += 1


@pytest.fixture
def checkpoints(tmp_path: Path, alone: dist.ProcessGroup) -> Checkpoints:
    return Checkpoints({}, RunLogger(RunFolder(tmp_path), 0, Display("run", 1, None)), alone)


@pytest.mark.parametrize(
    ("rank", "local_rank", "local_world_size", "count"),
    [(3, 3, 16, 12), (3, 3, 8, 8), (10, 2, 8, 4), (10, 2, 12, 4), (8, 0, 4, 4)],
)
def test_node_has_ranks_that_do_not_train(
    rank: int, local_rank: int, local_world_size: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load_recipe(ROOT / "recipes/demo-cpu.yaml", ["train.dp=12", "train.tp=1", "train.pp=1"])
    variables = {"RANK": rank, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_world_size, "WORLD_SIZE": 32}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    assert training_ranks_here(recipe) == count


class Together(RuntimeError):
    raised_on_all_ranks = True


@pytest.mark.parametrize(
    ("error", "finished"),
    [
        (None, 1),
        (Together(), 1),
        (EndpointError("the teacher's server is gone"), 1),
        (RuntimeError(), 0),
        (CheckpointWriteError("full", raised_on_all_ranks=True), 0),
    ],
)
def test_checkpoint_being_written_is_awaited_where_all_ranks_are_there(
    checkpoints: Any, error: BaseException | None, finished: int
) -> None:
    checkpoints._writing = written = Written(checkpoint_folder(checkpoints._record.folder, 4))
    checkpoints.__exit__(type(error), error, None)
    assert written.finished == finished


def test_checkpoint_that_its_owner_can_mend_is_not_set_aside(checkpoints: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoint_folder(checkpoints._record.folder, 1)
    folder.mkdir(parents=True)

    def link(models: object, path: Path, group: object) -> None:
        raise UnusableCheckpoint(f"{path}: a.distcp is a symbolic link", raised_on_all_ranks=True)

    monkeypatch.setattr(checkpoint, "load", link)
    with pytest.raises(UnusableCheckpoint, match="symbolic link"):
        checkpoints._load_last_intact()
    assert folder.exists()


def test_settings_of_a_step_say_how_many_checkpoints_stay(checkpoints: Any) -> None:
    """Also of a step after which none is written: the one that is being written is finished by them."""
    folder = checkpoints._record.folder
    for step in (1, 2, 3):
        checkpoint_folder(folder, step).mkdir(parents=True)
    checkpoints._writing = Written(checkpoint_folder(folder, 3))
    checkpoints.save_if_due(4, Progress(), Run(steps=9, checkpoint_every=5, keep_last=2))
    checkpoints.close()
    assert [checkpoint_folder(folder, step).exists() for step in (1, 2, 3)] == [False, True, True]


def test_checkpoint_that_stays_is_told_and_stops_nothing(checkpoints: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoints._record.folder
    for step in (1, 2):
        checkpoint_folder(folder, step).mkdir(parents=True)

    def busy(path: Path) -> None:
        raise OSError(39, "Directory not empty", str(path))

    monkeypatch.setattr(trainer_checkpoints, "remove", busy)
    checkpoints._writing, checkpoints._keep_last = Written(checkpoint_folder(folder, 2)), 1
    checkpoints.close()
    events = [json.loads(line) for line in folder.events.read_text().splitlines()]
    assert [(e["event"], e["step"]) for e in events] == [("checkpoint", 0), ("checkpoint_left", 1)]
    assert "Directory not empty" in events[1]["why"]
