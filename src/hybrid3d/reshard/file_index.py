"""Reads the index of a Hugging Face checkpoint: the file, shape and dtype of every tensor, from headers alone."""

from __future__ import annotations

import os
import reprlib
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from safetensors import SafetensorError, safe_open

from hybrid3d.errors import UserMistake
from hybrid3d.reshard.plan.layout import Shape
from hybrid3d.storage.user_files import UnreadableFile, parse_json, read_json_file

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
ADAPTER_FILE = "adapter_model.safetensors"  # of PEFT, which writes all adapters of a model into one file

# The safetensors format's names of dtypes and torch's: https://github.com/huggingface/safetensors (README, Format)
TORCH_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn"}
FILE_DTYPES = {torch_dtype: file_dtype for file_dtype, torch_dtype in TORCH_DTYPES.items()}
FP8 = "float8_e4m3fn"
SCALE_SUFFIX = "_scale_inv"  # of the block scales of an FP8 weight, as in DeepSeek-V3's checkpoints

MAX_HEADER_BYTES = 100_000_000  # the format's limit


class CheckpointError(UserMistake):
    """A checkpoint that cannot be read; the message names the file and the problem."""


# How config.json calls methods of quantization whose weights are not read, and what their tensors end in
_METHODS = {
    "gptq": "GPTQ", "awq": "AWQ", "bitsandbytes": "bitsandbytes", "compressed-tensors": "compressed-tensors",
    "mxfp4": "MXFP4", "modelopt": "ModelOpt", "torchao": "torchao", "fbgemm_fp8": "FBGEMM FP8",
}  # fmt: skip
_READ = (
    "weights are read in float64, float32, float16, bfloat16 and FP8 in blocks: take the checkpoint of the model that "
    "is not quantized, or dequantize it"
)
_QUANTIZED_TENSORS = {
    "qweight": "GPTQ or AWQ", "qzeros": "GPTQ or AWQ", "weight_packed": "compressed-tensors", "SCB": "bitsandbytes",
    "absmax": "bitsandbytes", "quant_map": "bitsandbytes", "bitsandbytes__nf4": "bitsandbytes",
    "bitsandbytes__fp4": "bitsandbytes", "weight_scale_2": "ModelOpt",
}  # fmt: skip


@dataclass(frozen=True)
class TensorEntry:
    """The file, shape and dtype of one tensor of a checkpoint.

    Attributes:
        dtype: torch's name of the dtype in which the tensor is read; bfloat16 if it is stored in FP8 with scales.
        scales: the block scales of a tensor that is stored in FP8.
        block: the rows and columns of a block that shares one scale.
    """

    file: str
    shape: Shape
    dtype: str
    scales: TensorEntry | None = None
    block: tuple[int, int] = (0, 0)


def read_shapes(folder: str | Path, single_file: str = SINGLE_FILE) -> dict[str, Shape]:
    """Return the shapes of all tensors of a checkpoint, by name; arguments and errors: as for `read_index`."""
    return {name: entry.shape for name, entry in read_index(folder, single_file).items()}


def read_index(folder: str | Path, single_file: str = SINGLE_FILE) -> dict[str, TensorEntry]:
    """Return the entries of all tensors of a checkpoint, by name. Only the headers of the files are read.

    Args:
        single_file: name of the file of a checkpoint without an index.

    Raises:
        CheckpointError: there is no safetensors file, a file is truncated, the index names a file or tensor that does
            not exist, or transformers would read other files or tensors.
    """
    folder = Path(folder)
    _check_method(folder)
    has_index = single_file == SINGLE_FILE and os.path.lexists(folder / INDEX_FILE)
    weight_map = _weight_map(folder) if has_index else None
    files = [single_file] if weight_map is None else sorted(set(weight_map.values()))
    entries: dict[str, TensorEntry] = {}
    twice: dict[str, set[str]] = {}
    for file in files:
        _check_regular(folder / file)
        found = _read_header(folder, file)
        for name in found.keys() & entries.keys():
            twice.setdefault(name, {entries[name].file}).add(file)
        entries |= {n: e for n, e in found.items() if weight_map is None or weight_map.get(n, file) == file}
    if weight_map is not None:
        missing = sorted(name for name in weight_map if name not in entries)
        if missing:
            raise CheckpointError(
                f"{folder / INDEX_FILE} names {len(missing)} tensors that are not in its files: {missing[:20]}"
            )
        _check_choice(folder, files, twice)
    return _attach_scales(folder, entries)


def _check_choice(folder: Path, files: list[str], twice: Mapping[str, set[str]]) -> None:
    """Check that transformers reads the same tensors of a folder whose index names `files`.

    It prefers a single file to the index, and of a tensor in two files, as those of `twice`, takes that of the last.
    """
    if files != [SINGLE_FILE] and os.path.isfile(folder / SINGLE_FILE):
        problem = f"{folder} has {INDEX_FILE} of {len(files)} files, and {SINGLE_FILE}"
        raise CheckpointError(f"{problem}, which transformers reads instead: remove the one that is not meant")
    if twice and _is_model(folder):
        name = min(twice)
        problem = f"{folder}: {len(twice)} tensors are in several files, {name} in {' and '.join(sorted(twice[name]))}"
        raise CheckpointError(f"{problem}: transformers reads the last and {INDEX_FILE} names one: remove the others")


def _is_model(folder: Path) -> bool:
    """Return whether transformers can read a folder as a model; others are read as their files are."""
    return os.path.isfile(folder / "config.json")


def _attach_scales(folder: Path, entries: dict[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Attach the block scales to the entries of FP8 weights, and remove the entries of the scales themselves."""
    quantized = {name for name, entry in entries.items() if entry.dtype == FP8}
    scaled = {name.removesuffix(SCALE_SUFFIX) for name in entries if name.endswith(SCALE_SUFFIX)}
    if scaled - quantized:
        without = sorted(scaled - quantized)
        raise CheckpointError(f"{folder}: {len(without)} {SCALE_SUFFIX} belong to no FP8 tensor: {without[:20]}")
    if not quantized:
        _check_not_quantized(folder)
    if not quantized or not (scaled or _is_model(folder)):
        return entries
    unscaled = sorted(name for name in quantized if name + SCALE_SUFFIX not in entries)
    if unscaled:
        raise CheckpointError(f"{folder}: {len(unscaled)} FP8 tensors lack their {SCALE_SUFFIX}: {unscaled[:20]}")
    block = _read_block_size(folder)
    with_scales = {}
    for name, entry in entries.items():
        if name in quantized:
            scales = entries[name + SCALE_SUFFIX]
            grid = tuple(-(-n // b) for n, b in zip(entry.shape, block, strict=False))
            if len(entry.shape) != 2 or scales.shape != grid:
                raise CheckpointError(
                    f"{folder}: {name}{SCALE_SUFFIX} has shape {list(scales.shape)}, "
                    f"but a tensor of shape {list(entry.shape)} in blocks of {list(block)} needs {list(grid)}"
                )
            with_scales[name] = TensorEntry(entry.file, entry.shape, "bfloat16", scales, block)
        elif name.removesuffix(SCALE_SUFFIX) not in scaled:
            with_scales[name] = entry
    return with_scales


def _check_method(folder: Path) -> None:
    """Check that a model is not quantized by another method than FP8 in blocks."""
    method = str(_quantization_of(folder).get("quant_method", "fp8"))
    if method != "fp8":
        raise CheckpointError(f"{folder} is quantized by {_METHODS.get(method, method)}, says config.json: {_READ}")


def _quantization_of(folder: Path) -> Mapping[str, Any]:
    """Return `quantization_config` of config.json; empty if there is none, or it cannot be read."""
    try:
        config = read_json_file(folder / "config.json")
    except UnreadableFile:  # other checks report it
        return {}
    found = config.get("quantization_config") if isinstance(config, dict) else None
    return found if isinstance(found, dict) else {}


def _check_not_quantized(folder: Path) -> None:
    """Check that config.json does not say that weights are in FP8: transformers and vLLM would look for scales."""
    if _quantization_of(folder).get("quant_method") == "fp8":
        problem = f"{folder}: config.json has quantization_config with quant_method fp8, and no tensor is in FP8"
        raise CheckpointError(f"{problem}: remove quantization_config if the weights were dequantized")


def _read_block_size(folder: Path) -> tuple[int, int]:
    """Return the rows and columns of a block that shares one scale, from config.json."""
    try:
        rows, columns = read_json_file(folder / "config.json")["quantization_config"]["weight_block_size"]
        return int(rows), int(columns)
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{folder} has FP8 weights, but its config.json has no quantization_config.weight_block_size: {error!r}"
        ) from None


def _weight_map(folder: Path) -> dict[str, str]:
    """Return the file of each tensor from the checkpoint's index; every path stays inside the folder."""
    path = folder / INDEX_FILE
    try:
        content = read_json_file(path)
        weight_map = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(weight_map, dict):
            raise ValueError(f'it holds {reprlib.repr(content)}, expected {{"weight_map": {{tensor: file}}}}')
        if not weight_map:
            raise ValueError("it names no tensor")
        for name, file in weight_map.items():
            if not isinstance(file, str) or not _is_inside_folder(file):
                raise ValueError(
                    f"it says that {reprlib.repr(name)} is in {reprlib.repr(file)}, expected the path of a file within "
                    "the folder"
                )
    except ValueError as error:
        raise CheckpointError(f"{path} is not a valid checkpoint index: {error}") from None
    return weight_map


def _is_inside_folder(file: str) -> bool:
    path = PurePosixPath(file)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and file.isprintable()


def _check_regular(path: Path) -> None:
    """Check that a weights file exists and is a regular file; opening a pipe, for example, could block forever."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} does not exist: a checkpoint needs {path.name}, or {INDEX_FILE} and its files"
        ) from None
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
        size, expected = (folder / file).stat().st_size, _expected_size(folder / file)
        problem = f"{folder / file} is damaged or truncated ({size} bytes)"
        problem += f": its header describes {expected} bytes" if expected not in (None, size) else ""
        raise CheckpointError(f"{problem}: {error}") from None


def _expected_size(path: Path) -> int | None:
    """Return the size in bytes that the header of a safetensors file describes; None if the header is unreadable."""
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
    if dtype not in TORCH_DTYPES:
        method = _QUANTIZED_TENSORS.get(name.rpartition(".")[2])
        quantized = f": it is quantized by {method}: {_READ}" if method else ""
        raise CheckpointError(f"{path}: {name} has dtype {dtype}; supported are {', '.join(TORCH_DTYPES)}{quantized}")
    return TORCH_DTYPES[dtype]
