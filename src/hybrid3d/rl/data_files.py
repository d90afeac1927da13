"""Reads columns of a data file, parquet or JSON Lines, with strings or chat turns.

Every problem with a file is a `DataError` that names the file and the column. Of parquet `check_columns` reads the
footer only; JSON Lines (`.jsonl`) are read line by line, and only the columns that are asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from hybrid3d.errors import UserMistake
from hybrid3d.rl.json_lines import NOT_JSON, InvalidLine, read_json_columns
from hybrid3d.storage.user_files import UnreadableFile, check_regular_file

# Raised by pyarrow for truncated or damaged files; UnicodeDecodeError if a name or a string is not UTF-8.
_UNREADABLE = (OSError, pa.ArrowException, UnicodeDecodeError)

MAX_ROWS, MAX_BYTES = 10_000_000, 8 * 2**30  # of a file's two columns, which every rank keeps in memory
BATCH_ROWS = 1024  # read at a time
# Text of a parquet file's columns per byte of the file: repetitions take no room in it, but all of them are tokenized
MAX_EXPANSION, ALWAYS_ALLOWED = 1_000, 256 * 2**20

JSON_LINES, MAX_JSON_BYTES = ".jsonl", 2**30

# Of the header of a parquet page, in Thrift's compact protocol
DICTIONARY_PAGE = 2  # of parquet's enum PageType
NEXT_INTEGER = 0x15  # the field after the last one, an i32
HEADER_BYTES = 3 * (1 + 5)  # of the fields that are read: type, uncompressed size, compressed size

# What a file that cannot be read seems to be, by its name and its first bytes
_NOT_PARQUET = "not a readable parquet file, or one cut short"
_ACCEPTED = "data files are parquet, or JSON Lines named *.jsonl"
_COMPRESSED = {".gz": "gunzip", ".zst": "unzstd", ".xz": "unxz", ".bz2": "bunzip2", ".zip": "unzip"}
_MAGIC = {b"\x1f\x8b": ".gz", b"\x28\xb5\x2f\xfd": ".zst", b"\xfd7zXZ": ".xz", b"BZh": ".bz2", b"PK\x03\x04": ".zip"}
_TABLES = {".csv": "CSV", ".tsv": "TSV", ".xlsx": "an Excel sheet", ".arrow": "Arrow", ".feather": "Feather"}

Turn = dict[str, str]
"""One turn of a conversation, with the keys `role` and `content`."""


class DataError(UserMistake):
    """A data file that cannot be used as it is."""


def check_columns(path: str | Path, columns: Sequence[str], chats: Sequence[str] = ()) -> int:
    """Check the columns of a file by its footer, and return its row count.

    A column may lie within structs, as `reward_model.ground_truth`. Columns in `chats` may also hold chat turns,
    `list<struct<role, content>>`.

    Raises:
        DataError: not readable, not parquet, truncated, too large or empty; or a column is missing or not of strings.
    """
    if _is_json(path):
        return len(_read_json(path, columns, chats, None)[0])
    try:
        with _open_file(path) as file:
            schema, rows, size = file.schema_arrow, int(file.metadata.num_rows), _uncompressed_bytes(file, columns)
    except _UNREADABLE as error:
        raise DataError(f"{path}: {_reason(path, error)}") from error
    if rows > MAX_ROWS or size > MAX_BYTES:
        raise DataError(
            f"{path}: {rows:,} rows of {size:,} bytes in the columns {', '.join(columns)}; every rank keeps them in "
            f"memory, at most {MAX_ROWS:,} rows of {MAX_BYTES:,} bytes: split the file"
        )
    _check_expansion(path, size)
    for column in columns:
        first = _column_path(schema, column)[0]
        if schema.names.count(first) > 1:
            raise DataError(f"{path}: {schema.names.count(first)} columns are called {first!r}: rename all but one")
        kind = _column_type(schema, column)
        if kind is None:
            raise DataError(f"{path}: no column {column!r}; the columns there: {', '.join(_names_in(schema))}")
        if _is_turns(kind) and column not in chats:
            raise DataError(
                f"{path}: column {column!r} holds chat turns: only prompts and pairs may, with data.chat_template: true"
            )
        if not _is_text(kind) and not _is_turns(kind):
            raise DataError(f"{path}: column {column!r} holds {kind}, expected strings")
    if rows == 0:
        raise DataError(f"{path}: no rows")
    return rows


def read_columns(
    path: str | Path, columns: Sequence[str], chats: Sequence[str] = (), first: int | None = None
) -> list[list[Any]]:
    """Return the strings or chat turns of each column, None where a value is null; of the `first` rows, if it is given.

    DataError as in `check_columns`.
    """
    if _is_json(path):
        return _read_json(path, columns, chats, first)
    check_columns(path, columns, chats)
    try:
        with _open_file(path) as file:  # `read_table` would add columns for folders named `key=value`
            return _read_batches(path, file, columns, first)
    except _UNREADABLE as error:
        raise DataError(f"{path}: {_reason(path, error)}") from error


def _is_json(path: str | Path) -> bool:
    return Path(path).suffix == JSON_LINES


def _read_json(path: str | Path, columns: Sequence[str], chats: Sequence[str], first: int | None) -> list[list[Any]]:
    _check_regular(path)
    try:
        size = Path(path).stat().st_size
        if size > MAX_JSON_BYTES:
            raise DataError(f"{path}: {size:,} bytes of JSON Lines, at most {MAX_JSON_BYTES:,}: write it as parquet")
        found = read_json_columns(path, columns, chats, first)
    except InvalidLine as error:
        raise DataError(f"{path}: {error}") from None
    except OSError as error:
        raise DataError(f"{path}: {_reason(path, error)}") from error
    if not found[0]:
        raise DataError(f"{path}: no rows")
    return found


def _open_file(path: str | Path) -> pq.ParquetFile:
    """Open a regular file: pyarrow itself would fetch an address, and wait for a FIFO.

    DataError: it is no regular file. One of `_UNREADABLE`: it cannot be read.
    """
    _check_regular(path)
    return pq.ParquetFile(pa.OSFile(str(path)))


def _check_expansion(path: str | Path, size: int) -> None:
    """Check that the text of columns is in proportion to the file. DataError: it is not, with both numbers."""
    if size > _most_text(path):
        raise DataError(
            f"{path}: a file of {Path(path).stat().st_size:,} bytes, of which {size:,} bytes of text or more would be "
            f"read, at most {_most_text(path):,}: it repeats a few rows: remove the repetitions"
        )


def _most_text(path: str | Path) -> int:
    return min(MAX_BYTES, max(ALWAYS_ALLOWED, MAX_EXPANSION * Path(path).stat().st_size))


def _check_regular(path: str | Path) -> None:
    try:
        check_regular_file(path)
    except UnreadableFile as error:
        absent = not Path(path).exists()
        raise DataError(f"{path}: {'' if absent else f'{_unreadable(path)}: '}{error.why}") from None


def _uncompressed_bytes(file: pq.ParquetFile, columns: Sequence[str]) -> int:
    """Return the uncompressed bytes of these columns, according to the file's footer."""
    first = {_column_path(file.schema_arrow, column)[0] for column in columns}
    groups = (file.metadata.row_group(index) for index in range(file.metadata.num_row_groups))
    parts = (group.column(index) for group in groups for index in range(group.num_columns))
    return sum(part.total_uncompressed_size for part in parts if part.path_in_schema.split(".")[0] in first)


def _read_batches(path: str | Path, file: pq.ParquetFile, columns: Sequence[str], first: int | None) -> list[list[Any]]:
    """Return the values of each column; counts their bytes in memory, which may be more than in the file."""
    found: list[list[Any]] = [[] for _ in columns]
    size = 0
    longest = max(1, longest_row(path, file.metadata, {_column_path(file.schema_arrow, one)[0] for one in columns}))
    rows = max(1, min(BATCH_ROWS, _most_text(path) // 4 // longest))  # arrow doubles what it has allocated
    for batch in file.iter_batches(batch_size=rows, columns=list(columns)):
        size += sum(_text_bytes(batch.column(index)) for index in range(batch.num_columns))
        _check_expansion(path, size)
        table = pa.Table.from_batches([batch])
        for values, column in zip(found, columns, strict=True):
            values += _column_values(table, column).to_pylist()
        if first is not None and len(found[0]) >= first:
            return [values[:first] for values in found]
    if len(found[0]) != file.metadata.num_rows:
        raise DataError(f"{path}: {_unreadable(path)}: {len(found[0])} of {file.metadata.num_rows} rows are there")
    return found


def longest_row(path: str | Path, metadata: Any, columns: Set[str]) -> int:
    """Return the bytes that a row may have besides those that only it has in the file; 0 if it can repeat nothing.

    Rows may repeat the texts of a dictionary page; those of other pages are in the file as often as they are read, so
    that the footer has their bytes. The size of a dictionary page is in its header only, and Arrow allocates that size
    and no more. Of lists it is that of a row of mean length. `metadata` is a `pyarrow.parquet.FileMetaData`; `columns`
    are named without structs within them.
    """
    most: dict[str, int] = {}
    with Path(path).open("rb") as file:
        for index in range(metadata.num_row_groups):
            group = metadata.row_group(index)
            for chunk in (group.column(number) for number in range(group.num_columns)):
                name = chunk.path_in_schema
                if name.split(".")[0] in columns:
                    per_row = -(-chunk.num_values // max(1, group.num_rows))
                    most[name] = max(most.get(name, 0), _repeated_bytes(file, chunk) * per_row)
    return sum(most.values())


def _repeated_bytes(file: BinaryIO, chunk: Any) -> int:
    """Return the bytes of a chunk that one of its values may have in common with others."""
    if "DELTA_BYTE_ARRAY" not in chunk.encodings:  # of values that begin as the one before
        file.seek(min(filter(None, (chunk.dictionary_page_offset, chunk.data_page_offset)), default=0))
        with suppress(StopIteration, ValueError):
            kind, size = _header(iter(file.read(HEADER_BYTES)))
            if kind == DICTIONARY_PAGE:
                return size
            if not any("DICTIONARY" in encoding for encoding in chunk.encodings):
                return 0
    return int(chunk.total_uncompressed_size)


def _header(content: Iterator[int]) -> tuple[int, int]:
    """Return the type of a page, and its uncompressed bytes. ValueError, StopIteration: it begins otherwise."""
    found = []
    for _ in range(2):
        if next(content) != NEXT_INTEGER:
            raise ValueError
        number = shift = 0
        while (part := next(content)) & 0x80:
            number |= (part & 0x7F) << shift
            shift += 7
        number |= part << shift
        found.append((number >> 1) ^ -(number & 1))  # zigzag
    return found[0], found[1]


def _text_bytes(array: pa.Array) -> int:
    """Return the bytes of an array's texts, those of a dictionary as often as they occur."""
    if pa.types.is_dictionary(array.type):
        if not len(array.dictionary):
            return 0
        return int(pc.sum(pc.take(pc.binary_length(array.dictionary), array.indices)).as_py() or 0)
    if pa.types.is_struct(array.type) or pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        parts = array.flatten()
        return sum(map(_text_bytes, parts if isinstance(parts, list) else [parts]))
    return int(array.nbytes)


def _column_type(schema: pa.Schema, column: str) -> pa.DataType | None:
    """Return the type of a column, which may lie within structs; None if there is no such column."""
    first, *within = _column_path(schema, column)
    kind = schema.field(first).type if first in schema.names else None
    for name in within:
        if kind is None or not pa.types.is_struct(kind) or kind.get_field_index(name) < 0:
            return None
        kind = kind.field(name).type
    return kind


def _column_values(table: pa.Table, column: str) -> pa.ChunkedArray:
    first, *within = _column_path(table.schema, column)
    return pc.struct_field(table.column(first), within) if within else table.column(first)


def _column_path(schema: pa.Schema, column: str) -> list[str]:
    return [column] if column in schema.names else column.split(".")


def _names_in(parts: Iterable[pa.Field], within: str = "") -> Iterator[str]:
    for part in parts:
        if within and "." in part.name:
            continue
        if pa.types.is_struct(part.type):
            yield from _names_in(part.type, f"{within}{part.name}.")
        else:
            yield within + part.name


def _is_turns(kind: pa.DataType) -> bool:
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)) or not pa.types.is_struct(kind.value_type):
        return False
    parts = {part.name: part.type for part in kind.value_type}
    return all(name in parts and _is_text(parts[name]) for name in ("role", "content"))


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return _is_text(kind.value_type)
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _unreadable(path: str | Path) -> str:
    return (NOT_JSON if _is_json(path) else _NOT_PARQUET) + _advise(path)


def _reason(path: str | Path, error: Exception) -> str:
    first_line = (str(error).splitlines() or [""])[0]
    return f"{_unreadable(path)}: {first_line}"


def _advise(path: str | Path) -> str:
    """Return what may be done about a data file that cannot be read; it begins with a colon. "" if nothing is known."""
    path = Path(path)
    if path.is_dir():
        names = sorted(file.name for file in path.iterdir() if file.suffix in (".parquet", ".jsonl"))
        inside = f", such as {path / names[0]}" if names else ""
        return f": {_ACCEPTED}; name one file in this folder{inside}"
    start = _first_bytes(path)
    if start.startswith(b"PAR1"):
        return ""
    suffix = path.suffix.lower()
    packed = next((kind for magic, kind in _MAGIC.items() if start.startswith(magic)), None)
    if packed or suffix in _COMPRESSED:
        command = _COMPRESSED[packed or suffix]
        return f": {_ACCEPTED}; this one is compressed: unpack it with {command}, or write it as parquet"
    if suffix in _TABLES:
        return f": {_ACCEPTED}; convert {_TABLES[suffix]}, for example with pandas' to_parquet"
    if start.lstrip().startswith(b"{") and path.suffix != ".jsonl":
        return f": {_ACCEPTED}; if this one has an object a line, rename it to {path.with_suffix('.jsonl').name}"
    if start.lstrip().startswith(b"["):
        return f": {_ACCEPTED}; this one is an array: write one object a line, as `jq -c '.[]'` does"
    return "" if suffix in (".parquet", ".jsonl") else f": {_ACCEPTED}"


def _first_bytes(path: Path) -> bytes:
    try:
        if not path.is_file():  # to open a FIFO would wait for a writer
            return b""
        with path.open("rb") as file:
            return file.read(64)
    except OSError:
        return b""
