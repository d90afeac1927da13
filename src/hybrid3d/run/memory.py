"""Measures the peak memory of a process during a phase of a step: on its GPU or, without one, of the process itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Literal

import torch

Peaks = Mapping[str, int]
"""The most bytes that a rank has used during each of its activities."""

CLEAR_REFS, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")
RESET_PEAK = "5"  # what proc(5) says to write to CLEAR_REFS


@cache
def measured_device() -> Literal["cuda", "cpu"]:
    """Return whose memory is measured."""
    return "cuda" if torch.cuda.is_available() else "cpu"


class MemoryMeter:
    """Measures the most bytes that this process uses between `start` and `stop`.

    On a GPU these are the bytes that torch has allocated, vLLM's pools included. Torch still counts memory
    that vLLM has freed while it sleeps: `asleep` returns how much that is, and `split` has to be called before it
    changes.

    Without a GPU they are the resident bytes of the process. Where the kernel does not let a process reset its peak,
    only the bytes at `start`, `split` and `stop` are seen.

    Attributes:
        asleep: returns the bytes that torch counts as allocated, but vLLM has freed.
    """

    def __init__(self) -> None:
        self.asleep: Callable[[], int] = lambda: 0
        self._peak, self._is_running, self._resets = 0, False, True

    def start(self) -> None:
        """Begin to measure; what was measured before is dropped."""
        self._reset()
        self._peak, self._is_running = self._since_reset(), True

    def split(self) -> None:
        """Take in what was measured until now, with the memory that is asleep now."""
        if self._is_running:
            self._peak = max(self._peak, self._since_reset())
            self._reset()

    def stop(self) -> int:
        """Return the most bytes since `start`. After it nothing is measured: stopped again, it returns the same."""
        self.split()
        self._is_running = False
        return self._peak

    def _reset(self) -> None:
        if measured_device() == "cuda":
            if torch.cuda.is_initialized():
                torch.cuda.reset_peak_memory_stats()
        elif self._resets:
            try:
                CLEAR_REFS.write_text(RESET_PEAK, encoding="utf-8")
            except OSError:
                self._resets = False

    def _since_reset(self) -> int:
        if measured_device() == "cuda":
            return max(0, torch.cuda.max_memory_allocated() - self.asleep())
        return _resident_bytes("VmHWM" if self._resets else "VmRSS")


def _resident_bytes(field: str) -> int:
    """Return a field of this process's status, which is in KiB; 0 if there is none."""
    try:
        found = re.search(rf"^{field}:\s+(\d+) kB$", STATUS.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0


meter = MemoryMeter()
"""That of this process: its peak can only be measured once at a time."""
