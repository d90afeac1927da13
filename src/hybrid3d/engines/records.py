"""Records of what hybrid3d touches of an engine's known versions: `records/<engine>-<version>.json`.

A record has, by name, the parameters of a function or constructor and a digest of the function's body, or of the value
of a constant. Where it has neither, the name exists.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.version import InvalidVersion, Version

from hybrid3d.engines.installed import Engine
from hybrid3d.errors import UserMistake

FOLDER = Path(__file__).resolve().parent / "records"

Touched = tuple[str | None, str | None]
"""The parameters as text, and a digest of the body or value."""


@dataclass(frozen=True)
class Record:
    """What is touched of one version of an engine."""

    engine: str
    version: str
    names: Mapping[str, Touched]


def digest_of(record: Record) -> str:
    """Return a digest of all that is touched: equal for versions that are the same to hybrid3d."""
    names = sorted((name, *touched) for name, touched in record.names.items())
    return hashlib.sha256(json.dumps(names).encode()).hexdigest()


def known_versions(engine: Engine, folder: Path = FOLDER) -> list[str]:
    """Return the versions of an engine that have records, oldest first."""
    begin = f"{engine.name}-"
    found = [name for path in folder.glob(f"{begin}*.json") if re.fullmatch(r"[\d.]+", name := path.stem[len(begin) :])]
    return sorted(found, key=Version)


def read_record(engine: Engine, version: str, folder: Path = FOLDER) -> Record:
    """Return the record of a version."""
    names = json.loads((folder / f"{engine.name}-{version}.json").read_text(encoding="utf-8"))
    return Record(engine.name, version, {name: (parameters, body) for name, (parameters, body) in names.items()})


def nearest_record(engine: Engine, version: str, folder: Path = FOLDER) -> Record | None:
    """Return the record of a version or of the nearest older one; of the oldest if there is none; None without any."""
    known = known_versions(engine, folder)
    if not known:
        return None
    try:
        older = [one for one in known if Version(one) <= Version(_public(version))]
    except InvalidVersion:
        older = known
    return read_record(engine, older[-1] if older else known[0], folder)


def is_known(record: Record | None, version: str) -> bool:
    """Return whether a record is of this version, whatever build of it is installed."""
    return record is not None and record.version == _public(version)


def write_record(record: Record, folder: Path = FOLDER) -> Path:
    """Write a record, a line for each name, and return its file.

    Raises:
        UserMistake: it cannot be written there.
    """
    lines = [f"{json.dumps(name)}: {json.dumps(touched)}" for name, touched in sorted(record.names.items())]
    path = folder / f"{record.engine}-{_public(record.version)}.json"
    try:
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    except OSError as error:
        raise UserMistake(
            f"--record: {path} cannot be written ({error.strerror}): use a copy of the sources"
        ) from error
    return path


def _public(version: str) -> str:
    """Return a version without the name of its build, as in 0.32.0+cpu."""
    return version.partition("+")[0]
