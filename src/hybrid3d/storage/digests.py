"""Digests of files, by which a run recognizes what it has read before."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

WHOLE = 256 * 2**20  # bytes; of a larger file only parts are read
PART, PARTS = 2**20, 64  # bytes of a part, and how many are spread evenly over a larger file


def file_digest(path: str | Path) -> str:
    """Return a digest of a file's size and content: of all of it up to 256 MiB, of 64 parts of 1 MiB beyond.

    A larger file holds weights, of which an update changes nearly all; reading all of them would take minutes.

    Raises:
        OSError: it cannot be read.
    """
    size, crc = os.path.getsize(path), 0
    with open(path, "rb") as file:
        if size <= WHOLE:
            while chunk := file.read(16 * PART):
                crc = zlib.crc32(chunk, crc)
        else:
            for part in range(PARTS):
                file.seek(part * (size - PART) // (PARTS - 1))
                crc = zlib.crc32(file.read(PART), crc)
    return f"{size}-{crc:08x}"
