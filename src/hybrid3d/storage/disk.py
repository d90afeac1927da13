"""Writing to a disk that may be full: what is said of it, and ranks that come to one end."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
DISK_FULL_MESSAGES = ("No space left on device", "Disk quota exceeded")  # errors lose their number between processes
LOW_SPACE_BYTES = 2**20  # bytes: where no more are free, a failure that gives no reason is put down to that


class CheckpointWriteError(RuntimeError):
    """Something could not be written; the message says where, why, and how many bytes are free there.

    Attributes:
        alike: whether every rank raises it, so that one of them is enough to tell.
    """

    def __init__(self, message: str, raised_on_all_ranks: bool = False):
        super().__init__(message)
        self.raised_on_all_ranks = raised_on_all_ranks


def free_bytes(path: Path) -> int:
    """What is free on the file system of `path`, which need not exist yet."""
    while not os.path.exists(path):  # False for a name that no file can have
        path = path.parent
    return shutil.disk_usage(path).free


def describe_write_error(path: Path, error: BaseException) -> str:
    """The message of a `CheckpointWriteError`, to be asked for while what was written is still there."""
    free = free_bytes(path)
    if _is_full(error) or free < LOW_SPACE_BYTES:
        return f"no room for {path}: {free} bytes are free on its file system: free some, or lower run.keep_last"
    return f"{path} could not be written ({_first_line(error)}); {free} bytes are free on its file system"


def is_file_error(error: BaseException) -> bool:
    """Whether an error is of a file rather than of another rank that is gone; torch's writer of files has its own."""
    chain = _chain(error)
    own = any("inline_container" in str(one) or "iostream" in str(one) for one in chain)
    return own or any(isinstance(one, OSError) and not isinstance(one, ConnectionError) for one in chain)


def _is_full(error: BaseException) -> bool:
    return any(
        getattr(one, "errno", None) in DISK_FULL_ERRNOS or any(s in str(one) for s in DISK_FULL_MESSAGES)
        for one in _chain(error)
    )


def _chain(error: BaseException) -> list[BaseException]:
    """An error and what it came of."""
    found: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in found:
        found.append(following)
        following = following.__cause__ or following.__context__
    return found


def _first_line(error: BaseException) -> str:
    of_ranks = getattr(error, "failures", None)  # torch's, which itself names ranks only: each with error and trace
    if of_ranks:
        error = next(iter(of_ranks.values()))[0]
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
