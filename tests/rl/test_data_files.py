"""Data files of strangers: whatever is in columns that nobody asks for, and files that take no room but much memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hybrid3d.rl.data_files import BATCH_ROWS, DataError, check_columns, longest_row, read_columns

TURNS = [{"role": "user", "content": "2+3?"}]


def write(path: Path, *lines: object) -> Path:
    path = path / "data.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["null", {"q": "a", "a": "1"}], "not a readable file of JSON Lines: line 1 holds null, expected an object"),
        (["[" * 20_000], "not a readable file of JSON Lines: line 1 is nested too deep"),
        ([{"q": "a", "a": "1"}, '{"q": ' + "[" * 20_000 + "]" * 20_000 + "}"], "line 2 is nested too deep"),
        ([{"q": "a", "a": "1"}, {"q": 3, "a": "1"}], "line 2: column 'q' holds a number, expected strings"),
        ([{"q": ["a"], "a": "1"}], "line 1: column 'q' holds a list, expected strings"),
        ([{"q": "a", "a": TURNS}], "line 1: column 'a' holds chat turns: only prompts and pairs may"),
        ([{"q": [{"role": "user", "content": ["a"]}], "a": "1"}], "line 1: column 'q' holds a list, expected strings"),
        (['{"q": "\\ud800", "a": "1"}'], "line 1: column 'q' holds half of a surrogate pair"),
        (['{"q": "a", "a": "1"}', '{"q": "a"'], "JSON Lines: line 2, column 10: Expecting"),
        ([{"q": "a", "of": {"x": "1"}}], "no column 'a'; the columns there: q, of.x"),
        (["", "  "], "no rows"),
    ],
)
def test_lines_that_cannot_be_used(tmp_path: Path, lines: list[object], message: str) -> None:
    path = write(tmp_path, *lines)
    for check in (check_columns, read_columns):
        with pytest.raises(DataError) as caught:
            check(path, ["q", "a"], ["q"])
        assert str(caught.value).startswith(f"{path}: ")
        assert message in str(caught.value)


def test_file_that_ended_the_process_is_a_message(tmp_path: Path) -> None:
    """In a process of its own, as it was a segmentation fault in the library."""
    path = write(tmp_path, "null", {"q": "a"})
    code = f"from hybrid3d.rl.data_files import read_columns; read_columns({str(path)!r}, ['q'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "DataError" in done.stderr


def test_columns_that_nobody_asks_for_are_not_looked_at(tmp_path: Path) -> None:
    many = {f"k{i}": i for i in range(100_000)}
    rows: list[dict[str, Any]] = [
        {"q": "2024-01-01", "a": "12:30:00", "x": 1},
        {"q": "2024-01-01T00:00:00Z", "a": "1", "x": "mixed"},
        {"q": TURNS, "a": None, "x": {"deep": [None, {"y": 2}]}},
        {"q": "last", **many},
    ]
    path = write(tmp_path, *rows[:3], "", '{"q": "digits", "a": "1", "x": ' + "1" * 5_000 + "}", rows[3])
    prompts, answers = read_columns(path, ["q", "a"], ["q"])
    assert prompts == ["2024-01-01", "2024-01-01T00:00:00Z", TURNS, "digits", "last"]
    assert answers == ["12:30:00", "1", None, "1", None]
    assert check_columns(path, ["q"], ["q"]) == 5
    assert read_columns(path, ["q"], first=2) == [["2024-01-01", "2024-01-01T00:00:00Z"]]


def test_columns_within_objects(tmp_path: Path) -> None:
    path = write(tmp_path, {"of.x": "0", "of": {"x": "1", "y": {"z": "2"}}}, {"of": None}, {"of": {"y": {}}})
    assert read_columns(path, ["of.x", "of.y.z"]) == [["0", None, None], ["2", None, None]]


TEXT = "x" * 500_000


@pytest.mark.parametrize("kind", ["dictionary", "repeated", "turns"])
def test_small_file_does_not_take_much_memory(tmp_path: Path, kind: str) -> None:
    """Its texts would be 5 GB of strings, those of the turns 1 GB."""
    rows, path = 10_000, tmp_path / "data.parquet"
    one: Any = pa.array([[{"role": "user", "content": TEXT}]] if kind == "turns" else [TEXT])
    if kind == "repeated":  # no dictionary in the file's schema, only in its pages
        column: Any = pa.chunked_array([one] * rows)
    else:
        indices = pa.array([0] * rows, pa.int32())
        column = (
            pa.DictionaryArray.from_arrays(indices, one) if kind == "dictionary" else pa.chunked_array([one] * 2_000)
        )
    pq.write_table(pa.table({"q": column}), path, compression="zstd")
    size = path.stat().st_size
    assert size < 100_000
    code = (
        "import resource, sys; from hybrid3d.rl.data_files import DataError, read_columns\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        f"try: read_columns({str(path)!r}, ['q'], ['q'])\n"
        "except DataError as error: print(error, file=sys.stderr)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert int(done.stdout) * 1024 < 2**30
    assert f"a file of {size:,} bytes" in done.stderr, done.stderr[-2000:]
    assert "at most 268,435,456" in done.stderr


def test_texts_that_repeat_are_read(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    pq.write_table(pa.table({"q": ["how many?"] * 100_000, "a": [str(i % 7) for i in range(100_000)]}), path)
    prompts, answers = read_columns(path, ["q", "a"])
    assert prompts == ["how many?"] * 100_000
    assert answers == [str(i % 7) for i in range(100_000)]


def longest(path: Path, table: pa.Table, **options: Any) -> int:
    pq.write_table(table, path, **options)
    return longest_row(path, pq.ParquetFile(path).metadata, {"q"})


def test_row_expands_by_a_dictionary_only(tmp_path: Path) -> None:
    """A dictionary page has each text once, behind 4 bytes of its length (parquet's encoding PLAIN)."""
    path, distinct = tmp_path / "data.parquet", [f"{i:0900}" for i in range(50)]
    page = 50 * (900 + 4)
    for compression in ("none", "snappy", "zstd"):
        table = pa.table({"q": distinct * 20, "other": ["x" * 5_000] * 1_000})
        assert longest(path, table, compression=compression) == page
        assert longest(path, table, compression=compression, row_group_size=100) == page
        assert longest(path, table, compression=compression, use_dictionary=False) == 0
    pairs = pa.table({"q": [[{"role": "user", "content": text}] * 3 for text in distinct * 20]})
    assert longest(path, pairs) == 3 * (page + len("user") + 4)
    pq.write_table(table, path, use_dictionary=False, column_encoding={"q": "DELTA_BYTE_ARRAY"})
    chunk = pq.ParquetFile(path).metadata.row_group(0).column(0)
    assert longest_row(path, pq.ParquetFile(path).metadata, {"q"}) == chunk.total_uncompressed_size
    with pq.ParquetWriter(path, table.schema) as writer:
        for part in (table.slice(0, 0), table, table.slice(0, 0)):
            writer.write_table(part)
    assert longest_row(path, pq.ParquetFile(path).metadata, {"q"}) == page
    assert read_columns(path, ["q"]) == [distinct * 20]


def test_texts_that_do_not_repeat_are_read_in_large_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"{i:01000}" for i in range(30_000)]  # 30 MB, of which arrow writes the first MB as a dictionary
    path, sizes = tmp_path / "data.parquet", []
    own = pq.ParquetFile.iter_batches
    monkeypatch.setattr(
        pq.ParquetFile, "iter_batches", lambda self, **how: sizes.append(how["batch_size"]) or own(self, **how)
    )
    for options in ({}, {"use_dictionary": False}):
        pq.write_table(pa.table({"q": texts}), path, compression="none", **options)
        assert read_columns(path, ["q"]) == [texts]
    assert sizes[0] > BATCH_ROWS / 2  # 70 by the size of the column
    assert sizes[1] == BATCH_ROWS
