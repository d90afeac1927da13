"""How much memory this machine, or this container, has. Standard library only."""

from __future__ import annotations

import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def total_memory() -> int:
    """Bytes of memory that processes here can have together, whatever they use now."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
    except OSError:  # no container, or one that does not say
        return physical
    return min(physical, int(limit)) if limit.isdecimal() else physical
