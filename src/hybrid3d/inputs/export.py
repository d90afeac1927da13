"""Prepares exports: tensor names, dtypes and shards, config and tokenizer files, and the output folder."""

from __future__ import annotations

import json
import math
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hybrid3d.config import RecipeError
from hybrid3d.families import Config
from hybrid3d.inputs.files import files_to_copy
from hybrid3d.reshard.file_index import TensorEntry, read_index
from hybrid3d.reshard.files import shard_entries
from hybrid3d.reshard.plan.layout import ITEMSIZE
from hybrid3d.storage.disk import free_bytes, free_inodes

UNFINISHED = "HYBRID3D_UNFINISHED_EXPORT"  # environment variable: the folder in which ranks write


def is_redundant(name: str, config: Config) -> bool:
    """Return whether a checkpoint tensor is redundant: computed from the config, or the copy of a tied weight."""
    tied_copy = name == "lm_head.weight" and bool(config.get("tie_word_embeddings"))
    return tied_copy or name.endswith(".rotary_emb.inv_freq")  # a buffer that published checkpoints may contain


def export_entries(source: str | Path, config: Config) -> dict[str, TensorEntry]:
    """Return the tensors of an export: those of the source checkpoint in its dtypes, assigned to new shards."""
    entries = {name: entry for name, entry in read_index(source).items() if not is_redundant(name, config)}
    return shard_entries({name: (entry.shape, entry.dtype) for name, entry in entries.items()})


def copy_config_and_tokenizer(source: str | Path, out: str | Path) -> None:
    """Copy the source's config, generation config, tokenizer, license and the like: what `files_to_copy` knows.

    Modes are not copied, because the files of a shared model are often read-only. Exports are not quantized, so
    `quantization_config` is removed from the config.
    """
    for name in files_to_copy(source):
        target = Path(out) / name
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(Path(source) / name, target)
    config = json.loads((Path(out) / "config.json").read_text(encoding="utf-8"))
    if config.pop("quantization_config", None):
        (Path(out) / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def check_output_folder(out: Path, source: str | Path, config: Config) -> None:
    """Check that an export can be written to `out`, before any process is started.

    Raises:
        RecipeError: it exists and is no empty folder, or its file system has too little space.
        CheckpointError: the checkpoint that the run started from cannot be read.
    """
    problem = None
    try:
        if os.path.lexists(out) and not (out.is_dir() and not any(out.iterdir())):
            problem = "it is not an empty folder: choose another, or remove it"
        elif os.path.ismount(out):  # the finished export is renamed to this path
            problem = f"a file system is mounted there: choose a folder in it, such as {out / 'model'}"
    except OSError as error:
        problem = f"it cannot be read ({error.strerror}): choose another folder"
    if problem is None:
        needed = sum(math.prod(e.shape) * ITEMSIZE[e.dtype] for e in export_entries(source, config).values())
        free = free_bytes(out.absolute())
        if needed > free:
            problem = f"the model takes {needed} bytes, and {free} are free there: free some, or choose another folder"
        elif free_inodes(out.absolute()) == 0:
            problem = "its file system has no inodes left: remove files, whatever their size, or choose another folder"
    if problem is not None:
        raise RecipeError(f"export to {out}", [problem])


@contextmanager
def unfinished_folder(out: Path) -> Iterator[Path]:
    """Create a folder next to `out` for writing, which the caller renames to `out`; it is removed if it still exists.

    RecipeError: it cannot be created.
    """
    try:
        target = Path(os.path.realpath(out))
        folder = target.with_name(f"{target.name}.{uuid.uuid4().hex[:12]}.partial")
        folder.mkdir(parents=True)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise RecipeError(f"export to {out}", [f"it cannot be created ({why}): choose another folder"]) from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
