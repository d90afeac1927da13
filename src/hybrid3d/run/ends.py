"""How ranks end that fail: the record that each leaves in its run's folder, and which of them caused the others."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Container, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec
from msgspec.structs import replace

from hybrid3d.process import SHARED_MEMORY
from hybrid3d.run.folder import RunFolder

MAX_RECORD = 2**24  # bytes; a larger file is not read


class Ended(msgspec.Struct, frozen=True):
    """How a rank has ended that failed.

    Attributes:
        reason: why, in one line.
        time: when, in seconds since 1970.
        peer: only because it had lost another rank.
        on_all_ranks: all ranks have raised it together.
        kind: `out_of_memory` if the next start has settings that need less.
        final: nothing is to start the ranks again after it.
    """

    rank: int
    reason: str
    time: float = msgspec.field(default_factory=time.time)
    peer: bool = False
    on_all_ranks: bool = False
    kind: Literal["error", "out_of_memory"] = "error"
    final: bool = False

    @classmethod
    def by_code(cls, rank: int, code: int) -> Ended:
        """Return how a rank has ended of which only the exit code is known, negative for a signal."""
        how = f"killed by {describe_signal(-code)}" if code < 0 else f"ended with exit code {code}"
        return cls(rank, how)

    def write(self, folder: RunFolder, exclusive: bool = False) -> bool:
        """Write this record for who started the rank, atomically, as that may read it at any moment.

        Returns:
            False if it cannot be written, as on a full disk.

        Raises:
            FileExistsError: with `exclusive`, there is a record of this rank already.
        """
        path = folder.failure_path(self.rank)
        draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        reason = self.reason.encode(errors="backslashreplace").decode()  # a path may have bytes that are no characters
        try:
            draft.write_bytes(msgspec.json.encode(replace(self, reason=reason)))
            if exclusive:
                os.link(draft, path)
            else:
                draft.replace(path)
            return True
        except FileExistsError:
            raise
        except OSError:
            return False
        finally:
            with suppress(OSError):
                draft.unlink(missing_ok=True)

    def message(self, folder: RunFolder) -> str:
        """Return the message about the run that has failed by this."""
        if self.on_all_ranks:
            return f"stopped: {self.reason}"
        return f"rank {self.rank} failed: {self.reason}\nits log: {folder.log_path(self.rank)}"


def read_ends(folder: RunFolder) -> Iterator[tuple[Path, Ended | None]]:
    """Yield the file of each rank that has left a record, and the record; None if it cannot be read."""
    for path in sorted(folder.logs.glob("rank-*.failure")):
        yield path, _read(path)


def read_end(folder: RunFolder, rank: int) -> Ended | None:
    """Return the record that a rank has left; None if there is none, or it cannot be read."""
    return _read(folder.failure_path(rank))


def _read(path: Path) -> Ended | None:
    with suppress(OSError, ValueError, RecursionError), open(path, "rb") as file:
        return msgspec.json.decode(file.read(MAX_RECORD), type=Ended)
    return None


def find_root_cause(folder: RunFolder, codes: Mapping[int, int], ranks: Container[int] | None = None) -> Ended:
    """Return the end that caused the others.

    It is the one after which ranks that train were not started again; otherwise the first error that is not about a
    lost peer; otherwise a rank that was killed by a signal; otherwise the first error about a lost peer.

    Args:
        codes: the exit code of each rank that failed, negative for a signal.
        ranks: those whose records count; None if those of all do.
    """
    ends = [end for _, end in read_ends(folder) if end is not None and (ranks is None or end.rank in ranks)]
    causes = [end for end in ends if end.final] or [end for end in ends if not end.peer]
    killed = {rank: code for rank, code in codes.items() if code < 0 and code != -signal.SIGTERM}
    if causes or (ends and not killed):
        return min(causes or ends, key=lambda end: end.time)
    rank, code = next(iter((killed or codes).items()))
    return Ended.by_code(rank, code)


def describe_signal(number: int) -> str:
    """Return a signal's name; for SIGBUS with what is left of the shared memory, which is its usual cause."""
    try:
        name = signal.Signals(number).name
    except ValueError:  # those between SIGRTMIN and SIGRTMAX have none
        name = f"signal {number}"
    if number != signal.SIGBUS or not SHARED_MEMORY.is_dir():
        return name
    space = shutil.disk_usage(SHARED_MEMORY)
    return (
        f"{name}, which is what a full {SHARED_MEMORY} or a full disk does to a process that writes to its memory: "
        f"{SHARED_MEMORY} has {space.free >> 20:,} MiB free of {space.total >> 20:,} now. Enlarge it (docker run "
        f"--shm-size=16g; mount -o remount,size=16g {SHARED_MEMORY} as root), or remove what others left there"
    )
