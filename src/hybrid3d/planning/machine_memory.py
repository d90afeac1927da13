"""The memory of this machine, or of this container. Imports only the standard library."""

from __future__ import annotations

import os
import re
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def total_memory() -> int:
    """Return the total memory in bytes that processes can use here, regardless of what is in use."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = (CGROUP / "memory.max").read_text(encoding="utf-8").strip()
    except OSError:  # not in a container, or the limit is not readable
        return physical
    return min(physical, int(limit)) if limit.isdecimal() else physical


def available_memory() -> int:
    """Return the bytes that are free on this machine and in this container."""
    left = [1 << 62]
    for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("MemAvailable:"):
            left.append(int(line.split()[1]) * 1024)
    limit, used = CGROUP / "memory.max", CGROUP / "memory.current"
    if limit.exists() and limit.read_text(encoding="utf-8").strip() != "max":
        cached = re.findall(
            r"^(?:in)?active_file (\d+)$", (CGROUP / "memory.stat").read_text(encoding="utf-8"), re.MULTILINE
        )
        left.append(
            int(limit.read_text(encoding="utf-8")) - int(used.read_text(encoding="utf-8")) + sum(map(int, cached))
        )  # page caches can be dropped
    return min(left)
