"""What is said when something cannot be written, by what the system and torch really raise."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from commands import ROOT
from hybrid3d.config import load_recipe
from hybrid3d.run.folder import RunFolder, append_rows
from hybrid3d.storage.disk import LOW_SPACE_BYTES, CheckpointWriteError, describe_write_error, free_bytes, is_file_error

UNSHARE = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--mount"]
FULL = Path("/dev/full")  # Linux: every write to it fails as on a full disk


def full_disk() -> OSError:
    with pytest.raises(OSError, match="No space left on device") as caught:
        FULL.write_text("x")
    return caught.value


def with_free(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(2 * free, free, free))


@pytest.mark.skipif(not FULL.exists(), reason="only Linux has /dev/full")
def test_describe_write_error_tells_no_room_from_other_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_free(monkeypatch, free=5 * LOW_SPACE_BYTES)
    error = full_disk()
    wrapped = RuntimeError("Worker failure: [Errno 28] No space left on device")
    for one in (error, pickle.loads(pickle.dumps(error)), wrapped, OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))):
        assert describe_write_error(tmp_path / "a/b", one).startswith(
            f"no room for {tmp_path}/a/b: {5 * LOW_SPACE_BYTES} bytes"
        )
    other = describe_write_error(tmp_path, OSError(errno.EIO, "Input/output error"))
    assert other.startswith(f"{tmp_path} could not be written (OSError: [Errno 5] Input/output error)")


def test_error_without_a_reason_where_little_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's writer says of a full disk where it is in the file, and a process that hands it on loses the cause."""
    error = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")
    assert is_file_error(error)
    for free, begins in (
        (0, "no room for"),
        (LOW_SPACE_BYTES, f"{tmp_path} could not be written (RuntimeError: [enforce"),
    ):
        with_free(monkeypatch, free)
        assert describe_write_error(tmp_path, error).startswith(begins)


def raise_while_handling(handled: OSError, cut: bool) -> None:
    """Raise that a peer is lost while another error is handled, cut from it or not."""
    try:
        raise handled
    except OSError:
        if cut:
            raise RuntimeError("Connection closed by peer") from None
        raise RuntimeError("Connection closed by peer")  # noqa: B904


def test_lost_peer_is_no_fault_of_files() -> None:
    assert not is_file_error(RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer"))
    assert not is_file_error(ConnectionResetError("Connection reset by peer"))
    assert is_file_error(OSError(errno.EIO, "Input/output error"))
    for cut in (False, True):
        with pytest.raises(RuntimeError) as caught:
            raise_while_handling(OSError(errno.ENOENT, "No such file or directory"), cut)
        assert is_file_error(caught.value) is not cut


def test_free_bytes_of_what_is_not_there_yet(tmp_path: Path) -> None:
    stat = os.statvfs(tmp_path)
    assert free_bytes(tmp_path / "not/there") == pytest.approx(stat.f_bavail * stat.f_frsize, rel=0.05)


NO_INODES = """
from pathlib import Path
from hybrid3d.storage.disk import describe_write_error, free_inodes
folder = Path("small")
assert free_inodes(folder / "not/there") == 7
try:
    for number in range(8):
        (folder / f"{number}").write_bytes(b"")
except OSError as error:
    print(number, describe_write_error(folder / "step-000004", error))
"""


@pytest.mark.processes
def test_disk_without_inodes(tmp_path: Path) -> None:
    """Where bytes are free, to free some would not help."""
    if subprocess.run([*UNSHARE, "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True).returncode:
        pytest.skip("mounting a small tmpfs needs root, or user namespaces")
    (tmp_path / "small").mkdir()
    (tmp_path / "script.py").write_text(NO_INODES)
    script = f"mount -t tmpfs -o size=4m,nr_inodes=8 tmpfs small && {sys.executable} script.py"
    path = {"PYTHONPATH": str(ROOT / "src"), "PATH": os.environ["PATH"]}
    done = subprocess.run([*UNSHARE, "sh", "-c", script], cwd=tmp_path, env=path, capture_output=True, text=True)
    assert done.stdout.startswith("7 no room for small/step-000004: its file system has no inodes left (4"), done
    assert "remove files, whatever their size, or lower run.keep_last" in done.stdout


@pytest.mark.skipif(not FULL.exists(), reason="only Linux has /dev/full")
def test_records_on_a_full_disk(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.metrics.symlink_to(FULL)
    with pytest.raises(CheckpointWriteError, match=f"no room for {folder.metrics}: [0-9]+ bytes are free"):
        append_rows(folder.metrics, [{"step": 0}])


def test_half_a_line_of_an_event_is_dropped(tmp_path: Path) -> None:
    """So that the next does not follow it on the same line."""
    folder, recipe = RunFolder(tmp_path), load_recipe(ROOT / "recipes/demo-cpu.yaml")
    folder.add_event("start", step=0)
    whole = folder.events.read_text()
    for text in (whole, whole + '{"time": 17'):
        folder.events.write_text(text)
        folder.create(recipe)
        assert folder.events.read_text() == whole
