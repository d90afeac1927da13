"""What an exported checkpoint has besides weights: the source's tensor names and dtypes, config and tokenizer."""

from __future__ import annotations

import fnmatch
import json
import math
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hybrid3d.config import RecipeError
from hybrid3d.families import Config, family_of
from hybrid3d.reshard.files import TensorEntry, read_index, shard_entries
from hybrid3d.reshard.layout import ITEMSIZE
from hybrid3d.storage.disk import free_bytes

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".index.json")
UNFINISHED = "HYBRID3D_UNFINISHED_EXPORT"  # where our launcher tells its ranks of the folder to write in

# What a published checkpoint may carry and no model holds: buffers that are computed from the config.
COMPUTED_TENSORS = ("*.rotary_emb.inv_freq",)


def is_redundant(name: str, config: Config) -> bool:
    """Whether a tensor of a checkpoint says nothing: it is computed, or a second copy of a tied one."""
    tied_copy = name == "lm_head.weight" and bool(config.get("tie_word_embeddings"))
    return tied_copy or any(fnmatch.fnmatch(name, pattern) for pattern in COMPUTED_TENSORS)


def is_untrained(name: str, config: Config) -> bool:
    """Whether a tensor of a checkpoint is in no model here, and is carried from the source through every export."""
    return any(fnmatch.fnmatch(name, pattern) for pattern in family_of(config).untrained(config))


def export_entries(source: str | Path, config: Config) -> dict[str, TensorEntry]:
    """The tensors of the checkpoint that the run started from, in its dtypes, dealt out to files anew."""
    found = {name: entry for name, entry in read_index(source).items() if not is_redundant(name, config)}
    return shard_entries({name: (entry.shape, entry.dtype) for name, entry in found.items()})


def copy_config_and_tokenizer(source: str | Path, out: str | Path) -> None:
    """Copy the source's config, generation config and tokenizer: every plain file that holds no weights.

    What is exported is not quantized, so its config does not say so.
    """
    for path in Path(source).iterdir():
        if path.is_file() and not path.name.endswith(WEIGHTS):
            shutil.copy2(path, Path(out) / path.name)
    config = json.loads((Path(out) / "config.json").read_text())
    if config.pop("quantization_config", None):
        (Path(out) / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def check_output_folder(out: Path, source: str | Path, config: Config) -> None:
    """Check that an export can be written to `out`, before anything is started.

    Raises:
        RecipeError: it is there and no empty folder, or its file system has too little room.
        CheckpointError: the checkpoint that the run started from, whose tensors it will have, cannot be read.
    """
    problem = None
    try:
        if os.path.lexists(out) and not (out.is_dir() and not any(out.iterdir())):
            problem = "it is not an empty folder: choose another, or remove it"
        elif os.path.ismount(out):  # the finished export could not take its place
            problem = f"a file system is mounted there: choose a folder in it, such as {out / 'model'}"
    except OSError as error:
        problem = f"it cannot be read ({error.strerror}): choose another folder"
    if problem is None:
        needed = sum(math.prod(e.shape) * ITEMSIZE[e.dtype] for e in export_entries(source, config).values())
        free = free_bytes(out.absolute())
        if needed > free:
            problem = f"the model takes {needed} bytes, and {free} are free there: free some, or choose another folder"
    if problem is not None:
        raise RecipeError(f"export to {out}", [problem])


@contextmanager
def unfinished_folder(out: Path) -> Iterator[Path]:
    """Make a new folder beside `out`, in which to write before it is renamed to `out`, and remove what is left of it.

    Raises:
        RecipeError: it cannot be made there.
    """
    try:
        place = Path(os.path.realpath(out))
        folder = place.with_name(f"{place.name}.{uuid.uuid4().hex[:12]}.partial")
        folder.mkdir(parents=True)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise RecipeError(f"export to {out}", [f"it cannot be made ({why}): choose another folder"]) from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
