"""Bounds how much a row of a parquet file can expand: by its dictionary pages, whose texts rows may repeat.

Texts of other pages are in the file as often as they are read, so that the footer has their bytes. The size of a
dictionary page is in its header only, in Thrift's compact protocol; Arrow allocates that size and no more.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

DICTIONARY_PAGE = 2  # of parquet's enum PageType
NEXT_INTEGER = 0x15  # the field after the last one, an i32
HEADER_BYTES = 3 * (1 + 5)  # of the fields that are read: type, uncompressed size, compressed size


def longest_row(path: str | Path, metadata: Any, columns: Set[str]) -> int:
    """Return the bytes that a row may have besides those that only it has in the file; 0 if it can repeat nothing.

    Of lists it is that of a row of mean length.

    Args:
        metadata: the file's footer, a `pyarrow.parquet.FileMetaData`.
        columns: names of columns, without those of structs within them.
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
