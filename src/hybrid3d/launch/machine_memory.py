"""The memory of this machine, or of this container. Imports only the standard library."""

from __future__ import annotations

import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def total_memory() -> int:
    """Return the total memory in bytes that processes can use here, regardless of what is in use."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
    except OSError:  # not in a container, or the limit is not readable
        return physical
    return min(physical, int(limit)) if limit.isdecimal() else physical
