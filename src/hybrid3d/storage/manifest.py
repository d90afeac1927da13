"""What a checkpoint consists of, so that one which was cut short or damaged is not taken for a whole one.

Megatron's format unpickles files of a checkpoint. What is checked here is checked before anything of it is unpickled.
"""

from __future__ import annotations

import heapq
import json
import os
import reprlib
import stat
import zlib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from hybrid3d.errors import UserMistake
from hybrid3d.storage.user_files import UnreadableFile, read_json_file

MANIFEST = "manifest.json"
PROGRESS = "progress.json"
REQUIRED = (".metadata", "metadata.json", "common.pt", PROGRESS)
SHARDS = (".distcp", ".pt")  # what the names of Megatron's other files end with
CHUNK = 16 * 2**20


class BrokenCheckpoint(UserMistake):
    """A file of a checkpoint is missing, or is not what was written.

    Attributes:
        alike: whether every rank raises it, so that one of them is enough to tell.
    """

    def __init__(self, message: str, raised_on_all_ranks: bool = False):
        super().__init__(message)
        self.raised_on_all_ranks = raised_on_all_ranks


class UnusableCheckpoint(BrokenCheckpoint):
    """A checkpoint cannot be used as it lies there, though nothing shows damage: whoever put it there can mend it."""


def write(folder: Path, crcs: Mapping[str, int]) -> None:
    """List a checkpoint's files, named by their path within `folder`, with sizes in bytes and CRC-32."""
    files = {name: {"bytes": (folder / name).stat().st_size, "crc32": crc} for name, crc in sorted(crcs.items())}
    with open(folder / MANIFEST, "w") as out:
        json.dump({"files": files}, out, indent=1)
        out.flush()
        os.fsync(out.fileno())


def fsync_and_crc(path: Path) -> int:
    """The CRC-32 of a file, and the file on the disk for good."""
    with open(path, "rb") as file:
        crc = _crc(file)
        os.fsync(file.fileno())
    return crc


def _crc(file: BinaryIO) -> int:
    crc = 0
    while chunk := file.read(CHUNK):
        crc = zlib.crc32(chunk, crc)
    return crc


def fsync_folder(folder: Path) -> None:
    """Have the names in a folder on the disk for good."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def list_files(folder: Path) -> list[str]:
    """The files of a checkpoint, sorted."""
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST)


def total_bytes(folder: Path) -> int:
    """What the files of a checkpoint take."""
    return sum((folder / name).stat().st_size for name in list_files(folder))


def check_sizes(folder: Path) -> None:
    """Check what a checkpoint's list of files tells without reading them: that all are there, in their sizes.

    Raises:
        BrokenCheckpoint: a file is missing, has another size or is no regular file, the list lacks one that Megatron
            would read, or there is no list.
    """
    files = read_manifest(folder)
    lacking = [name for name in REQUIRED if name not in files]
    if lacking:
        raise BrokenCheckpoint(f"{folder}: {MANIFEST} does not list {lacking[0]}, which every checkpoint has")
    for name, (size, _) in files.items():
        _check_size(folder, name, size)
    try:
        there = list_files(folder)
    except OSError as error:
        raise UnusableCheckpoint(f"{folder} cannot be read ({error})") from None
    for name in there:
        if name not in files and name.endswith(SHARDS):
            problem = f"{folder}: {MANIFEST} does not list {reprlib.repr(name)}, which looks like a file of Megatron's"
            raise UnusableCheckpoint(f"{problem}: move it elsewhere")


def check(folder: Path, rank: int = 0, ranks: int = 1) -> None:
    """Hold a rank's share of a checkpoint's files against its list: size and CRC-32 of each.

    Raises:
        BrokenCheckpoint: what is wrong with it, with both numbers.
    """
    files = read_manifest(folder)
    for name in _shares({name: size for name, (size, _) in files.items()}, ranks)[rank]:
        size, crc32 = files[name]
        _check_size(folder, name, size)
        try:
            with open(folder / name, "rb") as file:
                crc = _crc(file)
        except OSError as error:
            raise UnusableCheckpoint(f"{folder}: {name} cannot be read ({error})") from None
        if crc != crc32:
            raise BrokenCheckpoint(f"{folder}: {name} has CRC-32 {crc:08x}, written was {crc32:08x}")


def _shares(sizes: Mapping[str, int], ranks: int) -> list[list[str]]:
    """Deal files to ranks, the largest first, each to whoever has the fewest bytes: the same on every rank."""
    shares: list[list[str]] = [[] for _ in range(ranks)]
    heap = [(0, rank) for rank in range(ranks)]
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        taken, rank = heapq.heappop(heap)
        shares[rank].append(name)
        heapq.heappush(heap, (taken + sizes[name], rank))
    return shares


def _check_size(folder: Path, name: str, size: int) -> None:
    """Check a listed file lies in the folder itself, where no link leads out of it, and has its size."""
    path = folder
    try:
        for part in PurePosixPath(name).parts:
            path = path / part
            found = os.lstat(path)
            if stat.S_ISLNK(found.st_mode):
                target = reprlib.repr(os.readlink(path))
                raise UnusableCheckpoint(f"{folder}: {name} is a symbolic link to {target}: put the file itself there")
    except (FileNotFoundError, NotADirectoryError):
        raise BrokenCheckpoint(f"{folder}: {name} is missing") from None
    except OSError as error:
        raise UnusableCheckpoint(f"{folder}: {name} cannot be read ({error.strerror})") from None
    if not stat.S_ISREG(found.st_mode):
        kind = "a folder" if stat.S_ISDIR(found.st_mode) else "a pipe, a socket or a device"
        raise BrokenCheckpoint(f"{folder}: {name} is {kind}, and a file of {size} bytes was written")
    if found.st_size != size:
        raise BrokenCheckpoint(f"{folder}: {name} has {found.st_size} bytes, {size} were written")


def read_manifest(folder: Path) -> dict[str, tuple[int, int]]:
    """By name, size in bytes and CRC-32 of the files that a checkpoint's list has.

    Raises:
        BrokenCheckpoint: there is no list, it is damaged, or it has a name that leads out of the folder.
    """
    path = folder / MANIFEST
    unreadable = f"{folder} has no list of its files that can be read"
    if path.is_symlink():
        raise UnusableCheckpoint(f"{unreadable}: {path} is a symbolic link to {reprlib.repr(os.readlink(path))}")
    try:
        read = read_json_file(path, "a list of files")
        files = read.get("files") if isinstance(read, dict) else None
        if not isinstance(files, dict):
            raise ValueError(f'{path} holds {reprlib.repr(read)}, expected {{"files": {{name: ...}}}}')
        return {_checked_name(name): _size_and_crc(name, wanted) for name, wanted in files.items()}
    except (OSError, UnreadableFile, ValueError) as error:
        raise BrokenCheckpoint(f"{unreadable}: {error}") from None


def _checked_name(name: str) -> str:
    """A name of the list, known to be that of a file in the folder. ValueError: it may be another's."""
    path = PurePosixPath(name)
    inside = not path.is_absolute() and ".." not in path.parts and str(path) == name != "."
    if not inside or not name.isprintable() or name == MANIFEST:
        raise ValueError(f"{MANIFEST} lists {reprlib.repr(name)}, which is no name of a file in the folder")
    return name


def _size_and_crc(name: str, wanted: Any) -> tuple[int, int]:
    """What the list has of a file. ValueError: not a size in bytes and a CRC-32."""
    size, crc32 = (wanted.get("bytes"), wanted.get("crc32")) if isinstance(wanted, dict) else (None, None)
    if type(size) is not int or type(crc32) is not int or size < 0 or not 0 <= crc32 < 2**32:
        expected = '{"bytes": 0 or more, "crc32": 0 to 4294967295}'
        raise ValueError(f"{MANIFEST} has {reprlib.repr(wanted)} of {reprlib.repr(name)}, expected {expected}")
    return size, crc32
