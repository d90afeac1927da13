"""Why ranks failed: the records that they write for who started them, the one that caused the others, and messages."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Container, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console

from hybrid3d.process import SHARED_MEMORY
from hybrid3d.run.folder import RunFolder


def find_root_cause(
    folder: RunFolder, failures: Mapping[int, Any], ranks: Container[int] | None = None
) -> dict[str, Any]:
    """Return the failure that caused the others, with `rank`, `reason` and `kind`.

    It is the one after which ranks that train were not started again; otherwise the first error that is not about a
    lost peer; otherwise a rank that was killed by a signal; otherwise the first error about a lost peer.

    Args:
        failures: the launcher's record of each rank that failed: `exitcode`, negative for a signal.
        ranks: those whose errors count; None if those of all do.
    """
    reasons = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.logs.glob("rank-*.failure"))]
    reasons = [reason for reason in reasons if ranks is None or reason["rank"] in ranks]
    final = [reason for reason in reasons if reason.get("final")]
    causes = final or sorted((r for r in reasons if not r["peer"]), key=lambda r: r["time"])
    killed = {rank: -f.exitcode for rank, f in failures.items() if f.exitcode < 0 and -f.exitcode != signal.SIGTERM}
    if causes:
        return dict(causes[0])
    if killed:
        rank, number = next(iter(killed.items()))
        return failure_record(rank, f"killed by {describe_signal(number)}")
    if reasons:
        return min(reasons, key=lambda r: r["time"])
    rank, failure = next(iter(failures.items()))
    return failure_record(rank, f"ended with exit code {failure.exitcode}")


def describe_signal(number: int) -> str:
    """Return a signal's name; for SIGBUS with what is left of the shared memory, which is its usual cause."""
    name = signal.Signals(number).name
    if number != signal.SIGBUS or not SHARED_MEMORY.is_dir():
        return name
    space = shutil.disk_usage(SHARED_MEMORY)
    return (
        f"{name}, which is what a full {SHARED_MEMORY} or a full disk does to a process that writes to its memory: "
        f"{SHARED_MEMORY} has {space.free >> 20:,} MiB free of {space.total >> 20:,} now. Enlarge it (docker run "
        f"--shm-size=16g; mount -o remount,size=16g {SHARED_MEMORY} as root), or remove what others left there"
    )


def failure_record(rank: int, reason: str, peer: bool = False) -> dict[str, Any]:
    """Return the record of a rank that has failed now.

    Args:
        peer: only because it has lost another rank.
    """
    return {"rank": rank, "time": time.time(), "peer": peer, "reason": reason, "kind": "error"}


def failure_message(folder: RunFolder, rank: int, reason: Mapping[str, Any]) -> str:
    """Return the message about a failed run, from the reason of one rank or one that all ranks raised together."""
    if reason.get("on_all_ranks"):
        return f"stopped: {reason['reason']}"
    return f"rank {rank} failed: {reason['reason']}\nits log: {folder.log_path(rank)}"


def write_failure(path: Path, reason: Mapping[str, Any], exclusive: bool = False) -> bool:
    """Write a failure's reason for the launcher, atomically, because the launcher may read it at any moment.

    Returns:
        False if it cannot be written, as on a full disk.

    Raises:
        FileExistsError: with `exclusive`, the file exists already.
    """
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        draft.write_text(json.dumps(reason), encoding="utf-8")
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


def print_error(console: Console, message: str) -> None:
    console.print(message, style="red", highlight=False, markup=False, soft_wrap=True)
