"""What sandboxes may leave behind, which is nothing."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


def children() -> set[str]:
    """Processes that this one has started."""
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """No process below this one, no folder of a sandbox, no descriptor more than before."""
    before, descriptors = children(), len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert not list(Path(tempfile.gettempdir()).glob("sandbox-*"))
    assert children() <= before
