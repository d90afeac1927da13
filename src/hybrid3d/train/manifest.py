"""What a checkpoint consists of, so that one which was cut short or damaged is not taken for a whole one."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path

MANIFEST = "manifest.json"
CHUNK = 16 * 2**20


class BrokenCheckpoint(ValueError):
    """A file of a checkpoint is missing, or is not what was written."""


def write(folder: Path, crcs: Mapping[str, int]) -> None:
    """List a checkpoint's files, named by their path within `folder`, with sizes in bytes and CRC-32."""
    files = {name: {"bytes": (folder / name).stat().st_size, "crc32": crc} for name, crc in sorted(crcs.items())}
    with open(folder / MANIFEST, "w") as out:
        json.dump({"files": files}, out, indent=1)
        out.flush()
        os.fsync(out.fileno())


def crc_of(path: Path) -> int:
    """The CRC-32 of a file, and the file on the disk for good."""
    crc = 0
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            crc = zlib.crc32(chunk, crc)
        os.fsync(file.fileno())
    return crc


def sync_folder(folder: Path) -> None:
    """Have the names in a folder on the disk for good."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def names_in(folder: Path) -> list[str]:
    """The files of a checkpoint, sorted."""
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST)


def bytes_in(folder: Path) -> int:
    """What the files of a checkpoint take."""
    return sum((folder / name).stat().st_size for name in names_in(folder))


def check(folder: Path, share: slice = slice(None)) -> None:
    """Hold a share of a checkpoint's files against its list.

    Raises:
        BrokenCheckpoint: what is wrong with it, with both numbers.
    """
    for name, (bytes_, crc32) in list(listed(folder).items())[share]:
        path = folder / name
        if not path.exists():
            raise BrokenCheckpoint(f"{folder}: {name} is missing")
        size = path.stat().st_size
        if size != bytes_:
            raise BrokenCheckpoint(f"{folder}: {name} has {size} bytes, {bytes_} were written")
        try:
            crc = crc_of(path)
        except OSError as error:
            raise BrokenCheckpoint(f"{folder}: {name} cannot be read ({error})") from None
        if crc != crc32:
            raise BrokenCheckpoint(f"{folder}: {name} has CRC-32 {crc:08x}, written was {crc32:08x}")


def listed(folder: Path) -> dict[str, tuple[int, int]]:
    """By name, size in bytes and CRC-32 of the files that a checkpoint's list has.

    Raises:
        BrokenCheckpoint: there is no list, or it is damaged.
    """
    try:
        files = json.loads((folder / MANIFEST).read_text())["files"]
        return {name: (int(wanted["bytes"]), int(wanted["crc32"])) for name, wanted in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BrokenCheckpoint(f"{folder} has no list of its files that can be read ({error!r})") from None
