"""Finds the file system of a run's folder, and warns where a rename is not atomic."""

from __future__ import annotations

import re
from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")  # see proc(5); on Linux only

# File systems on which another machine may see a renamed folder late, twice, or in parts
NOT_ATOMIC = {"nfs", "nfs4", "cifs", "smb3", "9p", "afs", "vboxsf", "drvfs"}
NOT_ATOMIC |= {
    f"fuse.{name}" for name in ("sshfs", "s3fs", "gcsfuse", "goofys", "mountpoint-s3", "rclone", "blobfuse2")
}


def file_system_type(path: Path, mounts: str) -> str:
    """Return the type of an absolute path's file system, from the text of mountinfo; "" if it has no matching line."""
    found, depth = "", -1
    for line in mounts.splitlines():
        before, dash, after = line.partition(" - ")
        if not dash:
            continue
        point = Path(_plain(before.split(" ")[4]))
        # the later of two mounts at one point hides the other
        if path.is_relative_to(point) and len(point.parts) >= depth:
            found, depth = after.split(" ")[0], len(point.parts)
    return found


def file_system_warning(path: Path, mounts: str) -> tuple[str, str]:
    """Return the type of a path's file system and a warning; both are "" if renames are atomic there."""
    kind = file_system_type(path, mounts)
    if kind not in NOT_ATOMIC:
        return "", ""
    problem = f"{path} is on {kind}, where a rename is not atomic: a checkpoint may look complete on one node before it"
    return kind, f"{problem} is on another; resume checks its files, but put run.dir on a local or parallel file system"


def _plain(text: str) -> str:
    """Decode the octal escapes of mountinfo, such as that of a blank."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
