"""Indexes and safetensors files that lead elsewhere, or are not what they say: refused by name, and never opened."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save, save_file

from hybrid3d.reshard.file_index import INDEX_FILE, SINGLE_FILE, CheckpointError, read_index


def problem_of(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_index(folder)
    told = str(caught.value)
    assert str(folder) in told
    assert len(told) < 600
    assert told.isprintable()
    return told


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint's folder, and a good file of weights beside it."""
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"bias": torch.ones(2)}, tmp_path / "other.safetensors")
    return folder


def write_index(folder: Path, read: Any) -> None:
    (folder / INDEX_FILE).write_text(json.dumps(read))


@pytest.mark.parametrize(
    "file",
    ["../other.safetensors", "a/../../other.safetensors", "", ".", "..", "a\0b", "a\nb", 5, None, ["other"], {}],
)
def test_index_that_leads_out_of_its_folder(folder: Path, file: Any) -> None:
    write_index(folder, {"weight_map": {"bias": file}})
    told = problem_of(folder)
    assert f"{INDEX_FILE} is not a valid checkpoint index" in told
    if "\0" not in str(file):
        assert "it says that 'bias' is in " in told
        assert "expected the path of a file within the folder" in told


def test_index_with_an_absolute_path(folder: Path) -> None:
    write_index(folder, {"weight_map": {"bias": str(folder.parent / "other.safetensors")}})
    assert "expected the path of a file within the folder" in problem_of(folder)


def test_index_may_name_files_deeper_in_its_folder_and_links(folder: Path) -> None:
    """As the hub's cache has them."""
    (folder / "deep").mkdir()
    (folder / "deep/1.safetensors").symlink_to(folder.parent / "other.safetensors")
    write_index(folder, {"weight_map": {"bias": "deep/1.safetensors"}})
    assert read_index(folder)["bias"].shape == (2,)


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 10**5,
        b"5",
        b'{"weight_map": 5}',
        b'{"weight_map": {"a": "x", "a": "y"}}',
        b"\xff",
        b" " * (64 * 2**20 + 1),
    ],
    ids=range(6),
)  # fmt: skip
def test_index_that_is_none(folder: Path, content: bytes) -> None:
    (folder / INDEX_FILE).write_bytes(content)
    assert INDEX_FILE in problem_of(folder)


@pytest.mark.parametrize("name", [INDEX_FILE, SINGLE_FILE])
def test_index_or_single_file_that_is_no_file_is_refused(folder: Path, name: str) -> None:
    path = folder / name
    path.mkdir()
    assert name in problem_of(folder)
    path.rmdir()
    os.mkfifo(path)  # opening it would wait for a writer
    assert "pipe" in problem_of(folder)
    path.unlink()
    path.symlink_to(folder / "gone")
    assert name in problem_of(folder)


def of_header(header: Any, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(start: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    "content",
    [
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 2**40) + b"{}",
        struct.pack("<Q", 99_999_999) + b"{}",
        of_header({"a": entry(0, 8, [2]), "b": entry(4, 12, [2])}, bytes(12)),
        of_header({"a": entry(0, 8, [2]), "b": entry(12, 20, [2])}, bytes(20)),
        of_header({"a": entry(0, 80, [20])}, bytes(8)),
        of_header({"a": entry(0, 8, [2])}, bytes(80)),
        of_header({"a": entry(8, 0, [2])}, bytes(8)),
        of_header({"a": entry(-8, 0, [2])}, bytes(8)),
        of_header({"a": entry(0, 8, [3])}, bytes(8)),
        of_header({"a": entry(0, 8, [2**62, 2**62])}, bytes(8)),
        of_header({"a": entry(0, 10**300, [2])}, bytes(8)),
        of_header({"a": entry(0, 8, [2], "X99")}, bytes(8)),
        of_header({"a": 5}, bytes(8)),
        of_header(b"[" * 10_000, bytes(8)),
        of_header(b"\xff" * 8, bytes(8)),
    ],
    ids=range(16),
)
def test_headers_that_lie(folder: Path, content: bytes) -> None:
    (folder / SINGLE_FILE).write_bytes(content)
    assert f"{SINGLE_FILE} is damaged or truncated ({len(content)} bytes)" in problem_of(folder)


def test_file_cut_short_is_told_with_both_sizes(folder: Path) -> None:
    whole = save({"a": torch.arange(1000.0)})
    (folder / SINGLE_FILE).write_bytes(whole[:-100])
    assert f"({len(whole) - 100} bytes): its header describes {len(whole)} bytes" in problem_of(folder)
