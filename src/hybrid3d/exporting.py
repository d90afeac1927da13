"""What an exported checkpoint has besides weights: the source's tensor names and dtypes, config and tokenizer."""

from __future__ import annotations

import shutil
from pathlib import Path

from hybrid3d.reshard.files import Entry, read_index, shard_entries

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".index.json")


def export_entries(source: str | Path) -> dict[str, Entry]:
    """The tensors of the checkpoint that the run started from, in its dtypes, dealt out to files anew."""
    found = read_index(source)
    return shard_entries({name: (entry.shape, entry.dtype) for name, entry in found.items()})


def copy_companions(source: str | Path, out: str | Path) -> None:
    """Copy the source's config, generation config and tokenizer: every plain file that holds no weights."""
    for path in Path(source).iterdir():
        if path.is_file() and not path.name.endswith(WEIGHTS):
            shutil.copy2(path, Path(out) / path.name)
