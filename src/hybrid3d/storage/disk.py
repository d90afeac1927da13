"""Measures free disk space, and describes errors of writing, in particular those of a full disk.

It also finds the file system of a run's folder, and warns where a rename is not atomic.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from pathlib import Path

DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
DISK_FULL_MESSAGES = ("No space left on device", "Disk quota exceeded")  # an error from another process has no errno
LOW_SPACE_BYTES = 2**20  # with less free space, a failure without a known cause is reported as a full disk


class RunCheckpointError(Exception):
    """Base class of errors of a run's checkpoints; if it is `raised_on_all_ranks`, one report is enough."""

    def __init__(self, message: str, raised_on_all_ranks: bool = False):
        super().__init__(message)
        self.raised_on_all_ranks = raised_on_all_ranks


class CheckpointWriteError(RunCheckpointError, RuntimeError):
    """A file could not be written; the message says which, why, and how many bytes are free on its file system."""


def free_bytes(path: Path) -> int:
    """Return the free bytes on the file system of `path`, which need not exist yet."""
    while not os.path.exists(path):  # False for a name that no file can have
        path = path.parent
    return shutil.disk_usage(path).free


def free_inodes(path: Path) -> int | None:
    """Return how many files can still be made on the file system of `path`; None if that is not limited."""
    while not os.path.exists(path):
        path = path.parent
    status = os.statvfs(path)
    return status.f_favail if status.f_files else None  # Btrfs, for example, has no fixed number


def describe_write_error(path: Path, error: BaseException) -> str:
    """Return the message of a `CheckpointWriteError`. Call it before the partly written files are removed."""
    free = free_bytes(path)
    if _is_full(error) and free_inodes(path) == 0:
        problem = f"no room for {path}: its file system has no inodes left ({free} bytes are free)"
        return f"{problem}: remove files, whatever their size, or lower run.keep_last"
    if _is_full(error) or free < LOW_SPACE_BYTES:
        return f"no room for {path}: {free} bytes are free on its file system: free some, or lower run.keep_last"
    return f"{path} could not be written ({_first_line(error)}); {free} bytes are free on its file system"


def is_file_error(error: BaseException) -> bool:
    """Return whether an error comes from a file, also in torch's file writer, rather than from a lost rank."""
    chain = _chain(error)
    from_torch = any("inline_container" in str(link) or "iostream" in str(link) for link in chain)
    return from_torch or any(isinstance(link, OSError) and not isinstance(link, ConnectionError) for link in chain)


def _is_full(error: BaseException) -> bool:
    return any(
        getattr(one, "errno", None) in DISK_FULL_ERRNOS or any(s in str(one) for s in DISK_FULL_MESSAGES)
        for one in _chain(error)
    )


def _chain(error: BaseException) -> list[BaseException]:
    """Return an error and its chain of causes."""
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return chain


def _first_line(error: BaseException) -> str:
    failures = getattr(error, "failures", None)  # of torch's CheckpointException: the error and traceback of each rank
    if failures:
        error = next(iter(failures.values()))[0]
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


MOUNTS = Path("/proc/self/mountinfo")  # see proc(5); on Linux only

# File systems on which another machine may see a renamed folder late, twice, or in parts
FUSE_NOT_ATOMIC = ("sshfs", "s3fs", "gcsfuse", "goofys", "mountpoint-s3", "rclone", "blobfuse2")
NOT_ATOMIC = {"nfs", "nfs4", "cifs", "smb3", "9p", "afs", "vboxsf", "drvfs", *(f"fuse.{n}" for n in FUSE_NOT_ATOMIC)}


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
