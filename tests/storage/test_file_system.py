"""Which file system a path lies on, by the text of /proc/self/mountinfo as Linux writes it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from hybrid3d.storage.disk import MOUNTS, file_system_type, file_system_warning

# As recorded on nodes of a cluster, shortened: fields as in proc(5), with optional ones (shared:1) and without
RECORDED = r"""
22 28 0:21 / /proc rw,nosuid,nodev,noexec,relatime shared:13 - proc proc rw
28 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw
98 28 0:45 / /home rw,relatime shared:53 - nfs4 10.0.0.4:/export/home rw,vers=4.2,rsize=1048576,hard,proto=tcp
101 28 0:47 / /data rw,relatime - nfs filer:/vol/data rw,vers=3,nolock,addr=10.0.0.5
104 28 0:50 / /lustre rw,relatime shared:57 master:2 - lustre 10.1.0.1@o2ib:/fs1 rw,flock,lazystatfs
107 98 0:52 / /home/me/my\040bucket rw,nosuid,nodev,relatime - fuse.gcsfuse bucket rw,user_id=1000
110 101 259:3 / /data/scratch rw,relatime - xfs /dev/nvme1n1 rw,attr2
113 28 0:60 / /late rw,relatime - ext4 /dev/sdb1 rw
114 28 0:61 / /late rw,relatime - nfs4 filer:/late rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/runs/demo", "ext4"),
        ("/home/me/runs", "nfs4"),
        ("/homework/runs", "ext4"),
        ("/data/runs", "nfs"),
        ("/data/scratch/runs", "xfs"),
        ("/lustre/runs", "lustre"),
        ("/home/me/my bucket/runs", "fuse.gcsfuse"),
        ("/late/runs", "nfs4"),  # the later mount hides the earlier
        ("/", "ext4"),
    ],
)
def test_innermost_mount_counts(path: str, kind: str) -> None:
    assert file_system_type(Path(path), RECORDED) == kind
    found, said = file_system_warning(Path(path), RECORDED)
    if kind.startswith(("nfs", "fuse")):
        assert found == kind
        assert said.startswith(f"{path} is on {kind}, where a rename is not atomic")
    else:
        assert (found, said) == ("", "")


def test_file_system_type_is_unknown_without_mounts() -> None:
    assert file_system_type(Path("/runs"), "") == ""
    assert file_system_warning(Path("/runs"), "") == ("", "")


def test_this_machine(tmp_path: Path) -> None:
    """As `stat` of coreutils has it, which asks the file system itself."""
    if not MOUNTS.exists():
        pytest.skip("only Linux has /proc/self/mountinfo")
    asked = subprocess.run(["stat", "-f", "-c", "%T", tmp_path], capture_output=True, text=True, check=True).stdout
    assert (
        file_system_type(Path(os.path.realpath(tmp_path)), MOUNTS.read_text())[:3] == asked[:3]
    )  # stat says ext2/ext3 of ext4
