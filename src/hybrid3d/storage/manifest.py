"""Writes and checks the manifest of a checkpoint, which detects truncated, damaged, missing and misplaced files.

Megatron's format unpickles files of a checkpoint. The checks here run before anything is unpickled.

A run recognizes by digests of files what it has read before.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import os
import reprlib
import stat
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from hybrid3d.errors import UserMistake
from hybrid3d.storage.disk import RunCheckpointError
from hybrid3d.storage.user_files import UnreadableFile, read_json_file

MANIFEST = "manifest.json"
PROGRESS = "progress.json"
REQUIRED = (".metadata", "metadata.json", PROGRESS)  # and common.pt, where Megatron-Core before 0.19 wrote it
SHARDS = (".distcp", ".pt")  # suffixes of Megatron's other files
CHUNK = 16 * 2**20


class BrokenCheckpoint(RunCheckpointError, UserMistake):
    """A file of a checkpoint is missing, or differs from what was written."""


class UnusableCheckpoint(BrokenCheckpoint):
    """A checkpoint cannot be used although nothing shows damage, for example because of a symbolic link."""


class ForeignCheckpoint(UnusableCheckpoint):
    """An intact checkpoint of another step or another run than its place says."""


@dataclass(frozen=True)
class Identity:
    """Which run and step a checkpoint, or the record of a step, is of."""

    run: str  # id of the run, drawn when its folder is created
    folder: str  # name of the folder that was written
    updates: int  # number of the policy's updates
    recipe_digest: str  # digest of the settings that a resume must not change
    recipe: str  # the run's recipe as YAML
    inputs: Mapping[str, str]  # digests of the files that the run has read, by setting and file name


def write(
    folder: Path, crcs: Mapping[str, int], identity: Identity | None = None, versions: Mapping[str, str] | None = None
) -> None:
    """Write the manifest: a checkpoint's files, by their path within `folder`, with sizes in bytes and CRC-32.

    Files of a run have an identity. `versions` are those of the packages that wrote the files, by name.
    """
    files = {name: {"bytes": (folder / name).stat().st_size, "crc32": crc} for name, crc in sorted(crcs.items())}
    content = {"files": files} if identity is None else {"identity": asdict(identity), "files": files}
    content |= {"versions": dict(versions)} if versions else {}
    with open(folder / MANIFEST, "w", encoding="utf-8") as out:
        json.dump(content, out, indent=1)
        out.flush()
        os.fsync(out.fileno())


def fsync_and_crc(path: Path) -> int:
    """Flush a file to the disk and return its CRC-32."""
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
    """Flush the entries of a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def list_files(folder: Path) -> list[str]:
    """Return the files of a checkpoint without the manifest, as sorted paths within `folder`."""
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST)


def total_bytes(folder: Path) -> int:
    """Return the total size in bytes of a checkpoint's files."""
    return sum((folder / name).stat().st_size for name in list_files(folder))


def check_sizes(folder: Path) -> None:
    """Check a checkpoint's files against its manifest without reading them: all must exist with their sizes.

    Raises:
        BrokenCheckpoint: a file is missing, has another size or is no regular file; the manifest is missing, or lacks a
            file that every checkpoint has.
        UnusableCheckpoint: the folder cannot be read, or has a file for Megatron that the manifest does not list.
    """
    files = read_manifest(folder)
    missing = [name for name in REQUIRED if name not in files]
    if missing:
        raise BrokenCheckpoint(f"{folder}: {MANIFEST} does not list {missing[0]}, which every checkpoint has")
    if not any(name.endswith(SHARDS[0]) for name in files):
        raise BrokenCheckpoint(f"{folder}: {MANIFEST} lists no *{SHARDS[0]}, of which every checkpoint has some")
    for name, (size, _) in files.items():
        _check_size(folder, name, size)
    try:
        names = list_files(folder)
    except OSError as error:
        raise UnusableCheckpoint(f"{folder} cannot be read ({error})") from None
    for name in names:
        if name not in files and name.endswith(SHARDS):
            problem = f"{folder}: {MANIFEST} does not list {reprlib.repr(name)}, which looks like a file of Megatron's"
            raise UnusableCheckpoint(f"{problem}: move it elsewhere")


def check(folder: Path, rank: int = 0, ranks: int = 1) -> None:
    """Check the size and the CRC-32 of a rank's share of a checkpoint's files against the manifest.

    Raises:
        BrokenCheckpoint: a file is missing or differs; with both numbers.
        UnusableCheckpoint: a file cannot be read.
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
    """Assign files to ranks, the largest first, each to the rank with the fewest bytes; deterministic on all ranks."""
    shares: list[list[str]] = [[] for _ in range(ranks)]
    heap = [(0, rank) for rank in range(ranks)]
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        assigned, rank = heapq.heappop(heap)
        shares[rank].append(name)
        heapq.heappush(heap, (assigned + sizes[name], rank))
    return shares


def _check_size(folder: Path, name: str, size: int) -> None:
    """Check a listed file lies in the folder itself, where no link leads out of it, and has its size."""
    path = folder
    try:
        for part in PurePosixPath(name).parts:
            path = path / part
            status = os.lstat(path)
            if stat.S_ISLNK(status.st_mode):
                target = reprlib.repr(os.readlink(path))
                raise UnusableCheckpoint(f"{folder}: {name} is a symbolic link to {target}: put the file itself there")
    except (FileNotFoundError, NotADirectoryError):
        raise BrokenCheckpoint(f"{folder}: {name} is missing") from None
    except OSError as error:
        raise UnusableCheckpoint(f"{folder}: {name} cannot be read ({error.strerror})") from None
    if not stat.S_ISREG(status.st_mode):
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a pipe, a socket or a device"
        raise BrokenCheckpoint(f"{folder}: {name} is {kind}, and a file of {size} bytes was written")
    if status.st_size != size:
        raise BrokenCheckpoint(f"{folder}: {name} has {status.st_size} bytes, {size} were written")


def read_manifest(folder: Path) -> dict[str, tuple[int, int]]:
    """Return the size in bytes and the CRC-32 of each file that the manifest lists.

    Raises:
        BrokenCheckpoint: the manifest is missing or damaged, or has a name that leads out of the folder.
        UnusableCheckpoint: the manifest is a symbolic link.
        ForeignCheckpoint: the files were written to a folder of another name.
    """
    content = _read_content(folder)
    try:
        files = {_checked_name(name): _size_and_crc(name, entry) for name, entry in content["files"].items()}
    except ValueError as error:
        raise BrokenCheckpoint(f"{folder} has no list of its files that can be read: {error}") from None
    identity = _identity(folder, content)
    if identity is not None and identity.folder != folder.name:
        problem = f"{folder} is not what was written there: {MANIFEST} says {identity.folder}, expected {folder.name}"
        raise ForeignCheckpoint(f"{problem}: rename it to {identity.folder}, or remove it")
    return files


def read_identity(folder: Path) -> Identity | None:
    """Return which run and step a checkpoint is of; None if its writer did not say. Raises as `read_manifest` does."""
    return _identity(folder, _read_content(folder))


def read_versions(folder: Path) -> dict[str, str]:
    """Return the versions of what wrote a checkpoint, by package, or an empty dict. Raises as `read_manifest` does."""
    read = _read_content(folder).get("versions")
    return {str(name): str(version) for name, version in read.items()} if isinstance(read, dict) else {}


def content_digest(folder: Path) -> str:
    """Return a digest of a checkpoint's content: what has another digest is another checkpoint, whatever its step.

    Raises:
        BrokenCheckpoint, UnusableCheckpoint: as `read_manifest`.
    """
    _read_content(folder)
    return hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()[:16]


def _read_content(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    unreadable = f"{folder} has no list of its files that can be read"
    if path.is_symlink():
        raise UnusableCheckpoint(f"{unreadable}: {path} is a symbolic link to {reprlib.repr(os.readlink(path))}")
    try:
        read = read_json_file(path, "a list of files")
        if not isinstance(read, dict) or not isinstance(read.get("files"), dict):
            raise ValueError(f'{path} holds {reprlib.repr(read)}, expected {{"files": {{name: ...}}}}')
        return read
    except (OSError, UnreadableFile, ValueError) as error:
        raise BrokenCheckpoint(f"{unreadable}: {error}") from None


def _identity(folder: Path, content: Mapping[str, Any]) -> Identity | None:
    if "identity" not in content:
        return None
    read = content["identity"]
    kinds = {"updates": int, "inputs": dict}
    names = [field.name for field in fields(Identity)]
    if not isinstance(read, dict) or any(type(read.get(name)) is not kinds.get(name, str) for name in names):
        expected = f"expected {', '.join(names)}"
        raise BrokenCheckpoint(f"{folder}: {MANIFEST} has {reprlib.repr(read)} as identity, {expected}")
    return Identity(**{name: read[name] for name in names})


def _checked_name(name: str) -> str:
    """Return the name if it is that of a file in the folder. ValueError: it is not."""
    path = PurePosixPath(name)
    inside = not path.is_absolute() and ".." not in path.parts and str(path) == name != "."
    if not inside or not name.isprintable() or name == MANIFEST:
        raise ValueError(f"{MANIFEST} lists {reprlib.repr(name)}, which is not the name of a file in the folder")
    return name


def _size_and_crc(name: str, entry: Any) -> tuple[int, int]:
    """Return a file's entry of the manifest. ValueError: it is not a size in bytes and a CRC-32."""
    size, crc32 = (entry.get("bytes"), entry.get("crc32")) if isinstance(entry, dict) else (None, None)
    if type(size) is not int or type(crc32) is not int or size < 0 or not 0 <= crc32 < 2**32:
        expected = '{"bytes": 0 or more, "crc32": 0 to 4294967295}'
        raise ValueError(f"{MANIFEST} has {reprlib.repr(entry)} for {reprlib.repr(name)}, expected {expected}")
    return size, crc32


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
            return f"{size}-{_crc(file):08x}"
        for part in range(PARTS):
            file.seek(part * (size - PART) // (PARTS - 1))
            crc = zlib.crc32(file.read(PART), crc)
    return f"{size}-{crc:08x}"
