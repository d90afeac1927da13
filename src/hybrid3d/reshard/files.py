"""The safetensors files of a Hugging Face checkpoint as one more rank: boxes are read from and written into them."""

from __future__ import annotations

import json
import math
import os
import reprlib
import stat
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from hybrid3d.errors import UserMistake
from hybrid3d.reshard.box import Box
from hybrid3d.reshard.executor import NamedTensors, run_local_plan
from hybrid3d.reshard.layout import ITEMSIZE, Demand, Holdings, Piece, Shape, View, contiguous_stride
from hybrid3d.reshard.planner import FILES, local_plan
from hybrid3d.storage.user_files import parse_json, read_json_file

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

# The format's names of dtypes, https://github.com/huggingface/safetensors (README, Format)
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn"}
FP8 = "float8_e4m3fn"
SCALES = "_scale_inv"  # what the name of an FP8 weight's block scales ends with, in DeepSeek-V3's checkpoints
NAMES = {ours: theirs for theirs, ours in DTYPES.items()}


MAX_HEADER_BYTES = 100_000_000  # of a file, as the format has it


class CheckpointError(UserMistake):
    """A checkpoint that cannot be read: the message names the file and what is wrong with it."""


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a checkpoint: its file, its shape and its dtype (torch's name) as it is read.

    A tensor that lies there in FP8 reads as bfloat16: `scales` are its block scales and `block` a block's sides.
    """

    file: str
    shape: Shape
    dtype: str
    scales: TensorEntry | None = None
    block: tuple[int, int] = (0, 0)


def read_index(folder: str | Path) -> dict[str, TensorEntry]:
    """Every tensor of a checkpoint from the files' headers alone; no weight is read.

    Raises:
        CheckpointError: no safetensors file, a truncated file, a file or tensor that the index names and is not there.
    """
    folder = Path(folder)
    weight_map = _weight_map(folder) if os.path.lexists(folder / INDEX_FILE) else None
    files = [SINGLE_FILE] if weight_map is None else sorted(set(weight_map.values()))
    entries: dict[str, TensorEntry] = {}
    for file in files:
        _check_regular(folder / file)
        found = _read_header(folder, file)
        entries |= {name: e for name, e in found.items() if weight_map is None or weight_map.get(name, file) == file}
    if weight_map is not None:
        lost = sorted(name for name in weight_map if name not in entries)
        if lost:
            raise CheckpointError(f"{folder / INDEX_FILE} names {len(lost)} tensors that its files lack: {lost[:20]}")
    return _dequantized(folder, entries)


def _dequantized(folder: Path, entries: dict[str, TensorEntry]) -> dict[str, TensorEntry]:
    """The entries with FP8 weights as they read, and without their scales; FP8 that has none anywhere is itself."""
    quantized = {name for name, entry in entries.items() if entry.dtype == FP8}
    if not quantized or not any(name.endswith(SCALES) for name in entries):
        return entries
    unscaled = sorted(name for name in quantized if name + SCALES not in entries)
    if unscaled:
        raise CheckpointError(f"{folder}: {len(unscaled)} FP8 tensors lack their {SCALES}: {unscaled[:20]}")
    block = _block_of(folder)
    read = {}
    for name, entry in entries.items():
        if name in quantized:
            scales = entries[name + SCALES]
            grid = tuple(-(-n // b) for n, b in zip(entry.shape, block, strict=False))
            if len(entry.shape) != 2 or scales.shape != grid:
                raise CheckpointError(
                    f"{folder}: {name}{SCALES} has shape {list(scales.shape)}, "
                    f"and {list(entry.shape)} in blocks of {list(block)} needs {list(grid)}"
                )
            read[name] = TensorEntry(entry.file, entry.shape, "bfloat16", scales, block)
        elif name.removesuffix(SCALES) not in quantized:
            read[name] = entry
    return read


def _block_of(folder: Path) -> tuple[int, int]:
    """Sides of a block that shares a scale, as config.json says."""
    try:
        rows, columns = json.loads((folder / "config.json").read_text())["quantization_config"]["weight_block_size"]
        return int(rows), int(columns)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{folder} has FP8 weights, and its config.json no quantization_config.weight_block_size: {error!r}"
        ) from None


def _weight_map(folder: Path) -> dict[str, str]:
    """By tensor, the file that an index says it is in: a path that stays in the folder."""
    path = folder / INDEX_FILE
    try:
        read = read_json_file(path)
        weight_map = read.get("weight_map") if isinstance(read, dict) else None
        if not isinstance(weight_map, dict):
            raise ValueError(f'it holds {reprlib.repr(read)}, expected {{"weight_map": {{tensor: file}}}}')
        for name, file in weight_map.items():
            if not isinstance(file, str) or not _is_inside(file):
                told = f"it says that {reprlib.repr(name)} is in {reprlib.repr(file)}"
                raise ValueError(f"{told}, expected the path of a file within the folder")
    except ValueError as error:
        raise CheckpointError(f"{path} is no index of a checkpoint: {error}") from None
    return weight_map


def _is_inside(file: str) -> bool:
    """Whether the path of a file, relative to a folder, stays in it."""
    path = PurePosixPath(file)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and file.isprintable()


def _check_regular(path: Path) -> None:
    """Check that a file of weights is there, and a file: another kind might be waited for without end."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        told = f"{path} is not there: a checkpoint needs {SINGLE_FILE}, or {INDEX_FILE} and its files"
        raise CheckpointError(told) from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "a pipe, a socket or a device"
        raise CheckpointError(f"{path} is {kind}, expected a file in the safetensors format")


def _read_header(folder: Path, file: str) -> dict[str, TensorEntry]:
    try:
        with safe_open(folder / file, framework="pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (no iterator)
            return {
                n: TensorEntry(file, tuple(s.get_shape()), _dtype(folder / file, n, s.get_dtype()))
                for n, s in slices.items()
            }
    except (SafetensorError, OSError) as error:
        size, expected = (folder / file).stat().st_size, _size_by_header(folder / file)
        told = f"{folder / file} is damaged or cut short ({size} bytes)"
        told += f": its header describes {expected} bytes" if expected not in (None, size) else ""
        raise CheckpointError(f"{told}: {error}") from None


def _size_by_header(path: Path) -> int | None:
    """Bytes that a file in the safetensors format should have, by its header; None where that cannot be read."""
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > MAX_HEADER_BYTES:
                return None
            header = parse_json(file.read(length).decode())
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        size = 8 + length + max(map(int, ends), default=0)
        return size if 0 <= size < 2**63 else None
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        return None


def _dtype(path: Path, name: str, dtype: str) -> str:
    if dtype not in DTYPES:
        raise CheckpointError(f"{path}: {name} has dtype {dtype}; known are {', '.join(DTYPES)}")
    return DTYPES[dtype]


def file_pieces(entries: Mapping[str, TensorEntry]) -> tuple[Piece, ...]:
    """Every tensor as one piece that lies, contiguous, in the files."""
    return tuple(
        Piece(name, Box.full(e.shape), View(name, 0, contiguous_stride(e.shape)), e.dtype)
        for name, e in entries.items()
    )


def file_holdings(entries: Mapping[str, TensorEntry]) -> Holdings:
    return Holdings(file_pieces(entries))


def file_demand(entries: Mapping[str, TensorEntry]) -> Demand:
    return Demand(file_pieces(entries))


class CheckpointReader:
    """Source over a checkpoint's files: reads the slice that a piece asks for and nothing else."""

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
        entry = self._entries[piece.name]
        part = self._slice(entry.file, piece.name, piece.box)
        if entry.scales is None:
            return part
        # As DeepSeek-V3's own conversion does it: in float32, then rounded once.
        spans = zip(piece.box.start, piece.box.stop, entry.block, strict=True)
        of_block = [torch.arange(a, b) // side for a, b, side in spans]
        first, last = [int(dim[0]) for dim in of_block], [int(dim[-1]) for dim in of_block]
        box = Box(tuple(first), tuple(b - a + 1 for a, b in zip(first, last, strict=True)))
        scales = self._slice(entry.scales.file, piece.name + SCALES, box)
        rows, columns = (dim - a for dim, a in zip(of_block, first, strict=True))
        return (part.float() * scales.float()[rows][:, columns]).to(torch.bfloat16)

    def _slice(self, file: str, name: str, box: Box) -> torch.Tensor:
        if file not in self._open:
            self._open[file] = self._stack.enter_context(safe_open(self._folder / file, framework="pt"))
        index = tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))
        part: torch.Tensor = self._open[file].get_slice(name)[index]
        return part


def shard_entries(shapes: Mapping[str, tuple[Shape, str]], max_file_bytes: int = 5 * 10**9) -> dict[str, TensorEntry]:
    """Distribute tensors over files in the given order, as Hugging Face names them.

    Args:
        shapes: (shape, dtype) of each tensor.
        max_file_bytes: a file is closed before it would exceed this (5 GB is the hub's convention).
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
    """Lay out the files of a checkpoint: headers written, data of full length and zero, and the index.

    The room for the data is taken now: a rank that writes to memory whose file finds none is killed (SIGBUS).

    Raises:
        FileExistsError: there is a checkpoint already.
        OSError: there is no room; with the file.
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
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


def open_for_writing(folder: str | Path, entries: Mapping[str, TensorEntry]) -> dict[str, torch.Tensor]:
    """The tensors of files that `create_files` laid out, mapped into memory: writing them writes the files.

    Ranks write disjoint boxes of the same files, so the folder must be on a file system that all of them share and
    that keeps shared mappings coherent (local disks, Lustre, GPFS; several nodes over NFS do not).
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
    files: dict[str, dict[str, TensorEntry]] = {}
    for name, entry in sorted(entries.items(), key=lambda item: -ITEMSIZE[item[1].dtype]):  # wide first: aligned
        files.setdefault(entry.file, {})[name] = entry
    return files


def _header(group: Mapping[str, TensorEntry]) -> bytes:
    """8 bytes of length, then JSON padded with spaces to a multiple of 8."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, e in group.items():
        end = at + math.prod(e.shape) * ITEMSIZE[e.dtype]
        header[name] = {"dtype": NAMES[e.dtype], "shape": list(e.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def load_files(folder: str | Path, demand: Demand, tensors: Mapping[str, torch.Tensor], rank: int) -> None:
    """Bring a rank what it wants from a checkpoint's files: only the slices that it needs are read.

    Args:
        tensors: the local tensors in which the demand's views lie.

    Raises:
        CheckpointError: the files cannot be read.
        PlanError: something wanted is not in the files.
    """
    entries = read_index(folder)
    plan = local_plan(rank, {FILES: file_holdings(entries)}, {rank: demand})
    sink = NamedTensors(tensors)
    with CheckpointReader(folder, entries) as source, torch.no_grad():
        run_local_plan(plan, source, sink)
        for fill in demand.fills:
            sink.fill(fill)


def export_files(
    folder: str | Path,
    entries: Mapping[str, TensorEntry],
    holdings: Mapping[int, Holdings],
    tensors: Mapping[str, torch.Tensor],
    rank: int,
    excluded: Collection[str] = (),
) -> None:
    """Write a rank's share of a checkpoint whose files `create_files` laid out; every rank of `holdings` calls this.

    Args:
        but: tensors of the checkpoint that no rank holds, which `carry_files` brings.

    Raises:
        PlanError: a tensor of the checkpoint is held by no rank.
    """
    wanted = {name: entry for name, entry in entries.items() if name not in excluded}
    plan = local_plan(rank, holdings, {FILES: file_demand(wanted)})
    run_local_plan(plan, NamedTensors(tensors), NamedTensors(open_for_writing(folder, entries)))


def copy_tensors(
    source: str | Path, folder: str | Path, entries: Mapping[str, TensorEntry], names: Collection[str]
) -> None:
    """Copy tensors of one checkpoint into the files of another, tensor by tensor, as they read there."""
    if not names:
        return
    found, out = read_index(source), open_for_writing(folder, entries)
    with CheckpointReader(source, found) as reader:
        for piece in file_pieces({name: found[name] for name in names}):
            out[piece.name].copy_(reader.read(piece))
