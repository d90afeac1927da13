"""Checks that sandboxes leave nothing behind."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


def children() -> set[str]:
    """Return the child processes of this process."""
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Check that no child process, sandbox folder or additional file descriptor is left."""
    before, descriptors = children(), len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert not list(Path(tempfile.gettempdir()).glob("sandbox-*"))
    assert children() <= before
