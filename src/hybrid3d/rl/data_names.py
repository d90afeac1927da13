"""What a data file that cannot be read seems to be, by its name and its first bytes, and what to do about it."""

from __future__ import annotations

from pathlib import Path

ACCEPTED = "data files are parquet, or JSON Lines named *.jsonl"
_COMPRESSED = {".gz": "gunzip", ".zst": "unzstd", ".xz": "unxz", ".bz2": "bunzip2", ".zip": "unzip"}
_MAGIC = {b"\x1f\x8b": ".gz", b"\x28\xb5\x2f\xfd": ".zst", b"\xfd7zXZ": ".xz", b"BZh": ".bz2", b"PK\x03\x04": ".zip"}
_TABLES = {".csv": "CSV", ".tsv": "TSV", ".xlsx": "an Excel sheet", ".arrow": "Arrow", ".feather": "Feather"}
_START_BYTES = 64


def advise(path: str | Path) -> str:
    """Return what may be done about a data file that cannot be read; it begins with a colon. "" if nothing is known."""
    path = Path(path)
    if path.is_dir():
        names = sorted(file.name for file in path.iterdir() if file.suffix in (".parquet", ".jsonl"))
        inside = f", such as {path / names[0]}" if names else ""
        return f": {ACCEPTED}; name one file in this folder{inside}"
    start = _first_bytes(path)
    if start.startswith(b"PAR1"):
        return ""
    suffix = path.suffix.lower()
    packed = next((kind for magic, kind in _MAGIC.items() if start.startswith(magic)), None)
    if packed or suffix in _COMPRESSED:
        command = _COMPRESSED[packed or suffix]
        return f": {ACCEPTED}; this one is compressed: unpack it with {command}, or write it as parquet"
    if suffix in _TABLES:
        return f": {ACCEPTED}; convert {_TABLES[suffix]}, for example with pandas' to_parquet"
    if start.lstrip().startswith(b"{") and path.suffix != ".jsonl":
        return f": {ACCEPTED}; if this one has an object a line, rename it to {path.with_suffix('.jsonl').name}"
    if start.lstrip().startswith(b"["):
        return f": {ACCEPTED}; this one is an array: write one object a line, as `jq -c '.[]'` does"
    return "" if suffix in (".parquet", ".jsonl") else f": {ACCEPTED}"


def _first_bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_START_BYTES)
    except OSError:
        return b""
