"""The file system that a run's folder lies on, and what of it a run must not rely on."""

from __future__ import annotations

import re
from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")  # proc(5); there is none outside of Linux

# Where another machine may see a renamed folder late, twice, or in parts
NOT_ATOMIC = {"nfs", "nfs4", "cifs", "smb3", "9p", "afs", "vboxsf", "drvfs"}
NOT_ATOMIC |= {
    f"fuse.{name}" for name in ("sshfs", "s3fs", "gcsfuse", "goofys", "mountpoint-s3", "rclone", "blobfuse2")
}


def file_system_type(path: Path, mounts: str) -> str:
    """The type of the file system that an absolute path lies on, by the text of mountinfo; "" where no line tells."""
    found, longest = "", -1
    for line in mounts.splitlines():
        before, dash, after = line.partition(" - ")
        if not dash:
            continue
        point = Path(_plain(before.split(" ")[4]))
        # of two mounts at one point the later hides the other
        if path.is_relative_to(point) and len(point.parts) >= longest:
            found, longest = after.split(" ")[0], len(point.parts)
    return found


def file_system_warning(path: Path, mounts: str) -> tuple[str, str]:
    """The type of a path's file system, and what to say of it; both "" where a rename is one act there."""
    kind = file_system_type(path, mounts)
    if kind not in NOT_ATOMIC:
        return "", ""
    said = f"{path} is on {kind}, where a rename is not one act: a checkpoint may look whole on one node before it is"
    return kind, f"{said} on another; resume checks its files, but put run.dir on a local or parallel file system"


def _plain(text: str) -> str:
    """Mountinfo writes blanks and the like as octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
