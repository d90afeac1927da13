"""Reads and writes boxes in the safetensors files of a Hugging Face checkpoint, which the planner treats as a rank."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from hybrid3d.reshard.ends import NamedTensors, Source
from hybrid3d.reshard.file_index import FILE_DTYPES, INDEX_FILE, SCALE_SUFFIX, SINGLE_FILE, TensorEntry, read_index
from hybrid3d.reshard.move.executor import run_local_plan
from hybrid3d.reshard.plan.box import Box
from hybrid3d.reshard.plan.layout import FILES, ITEMSIZE, Demand, Holdings, Piece, Shape, View, contiguous_stride
from hybrid3d.reshard.plan.planner import local_plan


def file_pieces(entries: Mapping[str, TensorEntry]) -> tuple[Piece, ...]:
    """Return one contiguous piece for each tensor of the files."""
    return tuple(
        Piece(name, Box.full(e.shape), View(name, 0, contiguous_stride(e.shape)), e.dtype)
        for name, e in entries.items()
    )


class CheckpointReader:
    """A `Source` that reads pieces from the files of a checkpoint, and of each tensor only the slice that is needed."""

    def __init__(self, folder: str | Path, entries: Mapping[str, TensorEntry]):
        self._folder = Path(folder)
        self._entries = entries
        self._stack = ExitStack()
        self._open: dict[str, Any] = {}

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self._open.clear()
        self._stack.close()

    def read(self, piece: Piece) -> torch.Tensor:
        """Return the piece's elements, shaped as its box; FP8 with scales is dequantized to bfloat16."""
        entry = self._entries[piece.name]
        values = self._slice(entry.file, piece.name, piece.box)
        if entry.scales is None:
            return values
        # As in DeepSeek-V3's own conversion: multiplied in float32, then rounded once
        spans = zip(piece.box.start, piece.box.stop, entry.block, strict=True)
        block_index = [torch.arange(start, stop) // length for start, stop, length in spans]
        first, last = [int(dim[0]) for dim in block_index], [int(dim[-1]) for dim in block_index]
        box = Box(tuple(first), tuple(b - a + 1 for a, b in zip(first, last, strict=True)))
        scales = self._slice(entry.scales.file, piece.name + SCALE_SUFFIX, box)
        rows, columns = (dim - a for dim, a in zip(block_index, first, strict=True))
        return (values.float() * scales.float()[rows][:, columns]).to(torch.bfloat16)

    def _slice(self, file: str, name: str, box: Box) -> torch.Tensor:
        if file not in self._open:
            self._open[file] = self._stack.enter_context(safe_open(self._folder / file, framework="pt"))
        index = tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))
        values: torch.Tensor = self._open[file].get_slice(name)[index]
        return values


def shard_entries(shapes: Mapping[str, tuple[Shape, str]], max_file_bytes: int = 5 * 10**9) -> dict[str, TensorEntry]:
    """Distribute tensors over files in the given order; the files are named as Hugging Face names them.

    Args:
        shapes: (shape, dtype) of each tensor.
        max_file_bytes: the maximum size of a file with more than one tensor; 5 GB is the hub's convention.
    """
    groups: list[list[str]] = [[]]
    used = 0
    for name, (shape, dtype) in shapes.items():
        nbytes = math.prod(shape) * ITEMSIZE[dtype]
        if groups[-1] and used + nbytes > max_file_bytes:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += nbytes
    count = len(groups)
    files = [SINGLE_FILE] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    return {name: TensorEntry(file, *shapes[name]) for file, group in zip(files, groups, strict=True) for name in group}


def create_files(folder: str | Path, entries: Mapping[str, TensorEntry]) -> None:
    """Create the files of a checkpoint: headers, zeros for the data, and the index.

    The disk space is allocated here, because a rank that writes to a mapped file on a full disk is killed by SIGBUS.

    Raises:
        FileExistsError: the folder holds a checkpoint already.
        OSError: the disk space does not suffice; the error names the file.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.glob("*.safetensors")):
        raise FileExistsError(f"{folder} holds a checkpoint already: choose another folder or remove it")
    for file, group in _by_file(entries).items():
        header = _header(group)
        with open(folder / file, "xb") as out:
            out.write(header)
            out.flush()
            size = len(header) + sum(math.prod(e.shape) * ITEMSIZE[e.dtype] for e in group.values())
            try:
                os.posix_fallocate(out.fileno(), 0, size)
            except OSError as error:
                raise OSError(error.errno, f"{error.strerror}, {size} bytes are needed", str(folder / file)) from None
    if len(_by_file(entries)) > 1:
        total = sum(math.prod(e.shape) * ITEMSIZE[e.dtype] for e in entries.values())
        index = {"metadata": {"total_size": total}, "weight_map": {n: e.file for n, e in entries.items()}}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def open_for_writing(folder: str | Path, entries: Mapping[str, TensorEntry]) -> dict[str, torch.Tensor]:
    """Map the tensors of files from `create_files` into memory, and return them; writing to them writes the files.

    Ranks write disjoint boxes of the same files, so the folder must be on a file system that all ranks share and that
    keeps shared mappings coherent (local disks, Lustre and GPFS do; NFS across several nodes does not).
    """
    tensors = {}
    for file, group in _by_file(entries).items():
        at = len(_header(group))
        mapped = torch.from_numpy(np.memmap(Path(folder) / file, dtype=np.uint8, mode="r+"))
        for name, e in group.items():
            nbytes = math.prod(e.shape) * ITEMSIZE[e.dtype]
            tensors[name] = mapped[at : at + nbytes].view(getattr(torch, e.dtype)).view(e.shape)
            at += nbytes
    return tensors


def _by_file(entries: Mapping[str, TensorEntry]) -> dict[str, dict[str, TensorEntry]]:
    """Group the entries by file, the widest dtype first, so that every tensor is aligned."""
    files: dict[str, dict[str, TensorEntry]] = {}
    for name, entry in sorted(entries.items(), key=lambda item: -ITEMSIZE[item[1].dtype]):
        files.setdefault(entry.file, {})[name] = entry
    return files


def _header(group: Mapping[str, TensorEntry]) -> bytes:
    """Return a file's header: its length in 8 bytes, then JSON padded with spaces to a multiple of 8 bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, e in group.items():
        end = at + math.prod(e.shape) * ITEMSIZE[e.dtype]
        header[name] = {"dtype": FILE_DTYPES[e.dtype], "shape": list(e.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def load_files(
    folder: str | Path,
    demand: Demand,
    tensors: Mapping[str, torch.Tensor],
    rank: int,
    single_file: str = SINGLE_FILE,
) -> None:
    """Load what a rank wants into its local tensors from the files of a checkpoint, of which only that is read.

    Args:
        single_file: as for `read_index`.

    Raises:
        CheckpointError: the files cannot be read.
        PlanError: the files lack a wanted tensor or a part of it.
    """
    entries = read_index(folder, single_file)
    plan = local_plan(rank, {FILES: Holdings(file_pieces(entries))}, {rank: demand})
    sink = NamedTensors(tensors)
    with CheckpointReader(folder, entries) as source, torch.no_grad():
        run_local_plan(plan, source, sink)
        for fill in demand.fills:
            sink.fill(fill)


def export_files(
    folder: str | Path,
    entries: Mapping[str, TensorEntry],
    holdings: Mapping[int, Holdings],
    source: Source,
    rank: int,
    excluded: Collection[str] = (),
) -> None:
    """Write a rank's share of a checkpoint into files from `create_files`; every rank of `holdings` calls this.

    Args:
        excluded: tensors of the checkpoint that are not written here.

    Raises:
        PlanError: no rank holds a tensor that is to be written, or a part of it.
    """
    wanted = {name: entry for name, entry in entries.items() if name not in excluded}
    plan = local_plan(rank, holdings, {FILES: Demand(file_pieces(wanted))})
    run_local_plan(plan, source, NamedTensors(open_for_writing(folder, entries)))


def copy_tensors(
    source: str | Path, folder: str | Path, entries: Mapping[str, TensorEntry], names: Collection[str]
) -> None:
    """Copy tensors of one checkpoint into the files of another, one at a time; FP8 with scales is dequantized.

    Args:
        folder, entries: as given to `create_files`.
    """
    if not names:
        return
    source_entries, targets = read_index(source), open_for_writing(folder, entries)
    with CheckpointReader(source, source_entries) as reader:
        for piece in file_pieces({name: source_entries[name] for name in names}):
            targets[piece.name].copy_(reader.read(piece))
