"""Writing a checkpoint's folder as one rank of a world of one: what stays when it goes wrong, and what is said."""

from __future__ import annotations

import errno
import json
import re
import signal
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.optimizer.optimizer import param_group_identifier_keys

from hybrid3d.run.ends import Ended, find_root_cause, read_end
from hybrid3d.run.folder import RunFolder
from hybrid3d.storage import manifest
from hybrid3d.storage.disk import CheckpointWriteError
from hybrid3d.storage.manifest import BrokenCheckpoint, UnusableCheckpoint
from hybrid3d.train import writing
from hybrid3d.train.megatron import checkpoint

pytestmark = [pytest.mark.engines, pytest.mark.processes]


def what_is_said(folder: RunFolder, codes: dict[int, int]) -> str:
    return find_root_cause(folder, codes).message(folder)


FULL = Path("/dev/full")  # Linux: every write to it fails as on a full disk


@pytest.mark.skipif(not FULL.exists(), reason="only Linux has /dev/full")
def test_part_that_fails_ends_all_and_leaves_nothing(alone: dist.ProcessGroup, tmp_path: Path) -> None:
    folder, before = tmp_path / "step-000004.partial", tmp_path / "step-000002"
    for path in (folder, before):
        path.mkdir()
        (path / "a").write_text("a")
    assert writing.together(folder, lambda: 5, alone) == [5]
    with pytest.raises(CheckpointWriteError, match=f"no room for {folder}: [0-9]+ bytes are free") as caught:
        writing.together(folder, lambda: FULL.write_text("x"), alone)
    assert caught.value.raised_on_all_ranks
    assert not folder.exists()
    assert (before / "a").read_text() == "a"


def test_error_not_of_the_disk_stays_what_it_is(alone: dist.ProcessGroup, tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        writing.together(tmp_path, lambda: {}["x"], alone)
    assert tmp_path.exists()


def test_removal(tmp_path: Path) -> None:
    for name in ("step-000002", "step-000004", "step-000006.partial", "step-000008.broken"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a").write_text("a")
    writing.remove(tmp_path / "step-000002")
    writing.remove(tmp_path / "step-000003")
    writing.remove_unfinished(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000004", "step-000008.broken"]


def test_end_that_all_ranks_come_to_is_told_once(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.logs.mkdir()
    for rank in range(2):
        reason = {"rank": rank, "time": rank, "peer": False, "on_all_ranks": True, "reason": "no room for x"}
        folder.failure_path(rank).write_text(json.dumps(reason))
    assert what_is_said(folder, {}) == "stopped: no room for x"


def test_rank_that_fails_alone_is_named(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.logs.mkdir()
    killed = {1: -int(signal.SIGKILL)}
    log = folder.log_path(1)
    assert what_is_said(folder, killed) == f"rank 1 failed: killed by SIGKILL\nits log: {log}"
    folder.failure_path(0).write_text(json.dumps({"rank": 0, "time": 1, "peer": True, "reason": "lost"}))
    folder.failure_path(1).write_text(json.dumps({"rank": 1, "time": 2, "peer": False, "reason": "ValueError: x"}))
    assert what_is_said(folder, {}) == f"rank 1 failed: ValueError: x\nits log: {log}"


def test_reason_is_seen_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, write, seen = RunFolder(tmp_path), Path.write_bytes, []
    folder.logs.mkdir()

    def by_halves(path: Path, data: bytes) -> None:
        for part in (data[:5], data):
            write(path, part)
            seen.append([json.loads(one.read_text()) for one in folder.logs.glob("rank-*.failure")])

    monkeypatch.setattr(Path, "write_bytes", by_halves)
    end = Ended(0, "boom\udcff")
    assert end.write(folder)
    assert seen == [[], []]
    found = read_end(folder, 0)
    assert found is not None
    assert (found.reason, found.time) == ("boom\\udcff", end.time)


@pytest.mark.skipif(not FULL.exists(), reason="only Linux has /dev/full")
@pytest.mark.parametrize("broken", [0, -1])
def test_bucket_that_cannot_be_written_fails_its_checkpoint(
    alone: dist.ProcessGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: int
) -> None:
    """The disk is full for the first or the last of a rank's files: nothing stays, and the next one is written."""
    tensors = {name: torch.arange(6.0) for name in "abcd"}
    write_buckets = writing._write_buckets

    def state() -> dict[str, ShardedTensor]:
        return {name: ShardedTensor.from_rank_offsets(name, tensor) for name, tensor in tensors.items()}

    def write(step: int) -> None:
        writing.CheckpointWriter(state, tmp_path / f"step-{step}", {}, in_background=True, group=alone).finish()

    def to_full_disk(transforms: list[Any], buckets: list[Any]) -> dict[int, Any]:
        Path(buckets[broken][0]).symlink_to(FULL)
        return write_buckets(transforms, buckets)

    with monkeypatch.context() as patch:
        patch.setattr(writing, "_write_buckets", to_full_disk)
        with pytest.raises(CheckpointWriteError, match=r"no room for .*step-1") as caught:
            write(1)
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.ENOSPC
    write(2)
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-2"]
    loaded = dist_checkpointing.load(state(), str(tmp_path / "step-2"))
    assert all(loaded[name].equal(tensor) for name, tensor in tensors.items())


def test_settings_of_groups_are_found_at_another_learning_rate() -> None:
    """Megatron-Core 0.19 recognizes a group by its rate too: the current one gets the saved rate, as the state has."""

    def group(rate: float, **more: object) -> dict[str, object]:
        kind = {"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}
        return {**kind, "max_lr": rate, "min_lr": 0.0, **more}

    current = group(2e-4, params=[0])
    optimizer = SimpleNamespace(optimizer=SimpleNamespace(param_groups=[current]))
    (found,) = checkpoint._settings_of(optimizer, [group(1e-4, step=7)])
    assert found == group(1e-4, step=7)
    known = [key for key in param_group_identifier_keys if key in current]
    assert [current[key] for key in known] == [found[key] for key in known]
    assert current["params"] == [0]


def test_settings_of_experts_that_no_group_was_saved_for() -> None:
    """Rank 0, which saves what optimizers have in common, may have no experts; or they did not count as parallel."""

    def group(decay: float, experts: bool, **more: float) -> dict[str, float]:
        return {"wd_mult": decay, "lr_mult": 1.0, "is_expert_parallel": experts, "is_decoupled_lr": False, **more}

    saved = [group(1.0, False, step=7, lr=0.5), group(0.0, False, step=7, lr=0.25)]
    optimizer = SimpleNamespace(optimizer=SimpleNamespace(param_groups=[group(0.0, True), group(1.0, True)]))
    found = checkpoint._settings_of(optimizer, saved)
    assert found == [group(0.0, True, step=7, lr=0.25), group(1.0, True, step=7, lr=0.5)]


@pytest.mark.parametrize(
    ("wrote", "error", "told"),
    [
        ("0.19.2", UnusableCheckpoint, "megatron-core 0.19.2 wrote it, and 0.16.1, which is installed, cannot read it"),
        ("0.16.1", BrokenCheckpoint, "common.pt, which every checkpoint of megatron-core 0.16.1 has"),
        (None, BrokenCheckpoint, "common.pt, which every checkpoint of megatron-core 0.16.1 has"),
    ],
)
def test_checkpoint_of_later_megatron_is_refused_by_earlier_one(
    alone: dist.ProcessGroup,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    wrote: str | None,
    error: type[BrokenCheckpoint],
    told: str,
) -> None:
    folder = tmp_path / "step-1"
    tensor = ShardedTensor.from_rank_offsets("a", torch.arange(6.0))
    writing.CheckpointWriter(
        lambda: {"a": tensor}, folder, {"progress.json": {}}, in_background=False, group=alone
    ).finish()
    checkpoint.check(folder, alone)
    assert manifest.read_versions(folder) == {"megatron-core": version("megatron-core")}
    (folder / "common.pt").unlink(missing_ok=True)
    files = {name: manifest.fsync_and_crc(folder / name) for name in manifest.list_files(folder)}
    manifest.write(folder, files, versions=wrote and {"megatron-core": wrote})
    monkeypatch.setattr(checkpoint, "COMMON_FILE", "common.pt")
    monkeypatch.setattr(checkpoint, "WRITTEN_BY", {"megatron-core": "0.16.1"})
    with pytest.raises(error, match=re.escape(told)) as caught:
        checkpoint.check(folder, alone)
    assert type(caught.value) is error
