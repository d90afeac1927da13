"""Writing a checkpoint's folder as one rank of a world of one: what stays when it goes wrong, and what is said."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

from hybrid3d.launch import failures
from hybrid3d.launch.failures import failure_message, find_root_cause
from hybrid3d.run.folder import RunFolder
from hybrid3d.storage.disk import CheckpointWriteError
from hybrid3d.train import writing
from hybrid3d.train.megatron import checkpoint, patches

pytestmark = [pytest.mark.engines, pytest.mark.processes]


def what_is_said(folder: RunFolder, failures: dict[int, Any]) -> str:
    cause = find_root_cause(folder, failures)
    return failure_message(folder, cause["rank"], cause)


FULL = Path("/dev/full")  # Linux: every write to it fails as on a full disk


@pytest.mark.skipif(not FULL.exists(), reason="only Linux has /dev/full")
def test_a_part_that_fails_ends_all_and_leaves_nothing(alone: dist.ProcessGroup, tmp_path: Path) -> None:
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


def test_what_is_no_fault_of_the_disk_stays_what_it_is(alone: dist.ProcessGroup, tmp_path: Path) -> None:
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


def test_an_end_that_all_ranks_come_to_is_told_once(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.logs.mkdir()
    for rank in range(2):
        reason = {"rank": rank, "time": rank, "peer": False, "on_all_ranks": True, "reason": "no room for x"}
        folder.failure_path(rank).write_text(json.dumps(reason))
    assert what_is_said(folder, {}) == "stopped: no room for x"


def test_a_rank_that_fails_alone_is_named(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.logs.mkdir()
    killed = {1: SimpleNamespace(exitcode=-signal.SIGKILL)}
    log = folder.log_path(1)
    assert what_is_said(folder, killed) == f"rank 1 failed: killed by SIGKILL\nits log: {log}"
    folder.failure_path(0).write_text(json.dumps({"rank": 0, "time": 1, "peer": True, "reason": "lost"}))
    folder.failure_path(1).write_text(json.dumps({"rank": 1, "time": 2, "peer": False, "reason": "ValueError: x"}))
    assert what_is_said(folder, {}) == f"rank 1 failed: ValueError: x\nits log: {log}"


def test_a_reason_is_seen_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, write, seen = RunFolder(tmp_path), Path.write_text, []
    folder.logs.mkdir()

    def by_halves(path: Path, text: str, **encoded: str) -> None:
        for part in (text[:5], text):
            write(path, part, **encoded)
            seen.append([json.loads(one.read_text()) for one in folder.logs.glob("rank-*.failure")])

    monkeypatch.setattr(Path, "write_text", by_halves)
    reason = {"rank": 0, "reason": "boom"}
    assert failures.write_failure(folder.failure_path(0), reason)
    assert seen == [[], []]
    assert json.loads(folder.failure_path(0).read_text()) == reason


def killed(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.timeout(60)
def test_a_writer_that_is_killed(alone: dist.ProcessGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its checkpoint has no end, but ends; the next is written."""
    tensor = torch.arange(6.0)

    def state() -> dict[str, ShardedTensor]:
        return {"a": ShardedTensor.from_rank_offsets("a", tensor)}

    def write(step: int) -> None:
        writing.CheckpointWriter(state, tmp_path / f"step-{step}", {}, in_background=True, group=alone).finish()

    with monkeypatch.context() as patch:
        patch.setattr(FileSystemWriterAsync, "write_preloaded_data", killed)
        with pytest.raises(CheckpointWriteError, match="ended with code -9"):
            write(1)
    write(2)
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-2"]
    assert dist_checkpointing.load(state(), str(tmp_path / "step-2"))["a"].equal(tensor)


@pytest.mark.timeout(60)
def test_a_writer_that_never_begins(alone: dist.ProcessGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a fork may not, of a process with threads: another is begun, or the checkpoint has no end."""
    forked, tensor = tmp_path / "forked", torch.arange(6.0)

    def stuck_at_first(rank: int) -> None:
        if not forked.exists():
            forked.write_text(str(os.getpid()))
            time.sleep(60)

    def state() -> dict[str, ShardedTensor]:
        return {"a": ShardedTensor.from_rank_offsets("a", tensor)}

    monkeypatch.setattr(patches, "START_SECONDS", 1)
    monkeypatch.setattr(patches, "kill_when_parent_exits", stuck_at_first)
    writing.CheckpointWriter(state, tmp_path / "step-1", {}, in_background=True, group=alone).finish()
    assert dist_checkpointing.load(state(), str(tmp_path / "step-1"))["a"].equal(tensor)
    with pytest.raises(ProcessLookupError):
        os.kill(int(forked.read_text()), 0)
    monkeypatch.setattr(patches, "START_TRIES", 2)
    monkeypatch.setattr(patches, "kill_when_parent_exits", lambda rank: time.sleep(60))
    with pytest.raises(CheckpointWriteError, match="has started in 2 x 1 seconds"):
        writing.CheckpointWriter(state, tmp_path / "step-2", {}, in_background=False, group=alone).finish()
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-1"]


def test_settings_of_experts_that_no_group_was_saved_for() -> None:
    """Rank 0, which saves what optimizers have in common, may have no experts; or they did not count as parallel."""

    def group(decay: float, experts: bool, **more: float) -> dict[str, float]:
        return {"wd_mult": decay, "lr_mult": 1.0, "is_expert_parallel": experts, "is_decoupled_lr": False, **more}

    saved = [group(1.0, False, step=7, lr=0.5), group(0.0, False, step=7, lr=0.25)]
    optimizer = SimpleNamespace(optimizer=SimpleNamespace(param_groups=[group(0.0, True), group(1.0, True)]))
    found = checkpoint._settings_of(optimizer, saved)
    assert found == [group(0.0, True, step=7, lr=0.25), group(1.0, True, step=7, lr=0.5)]
