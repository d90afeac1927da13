"""What an exported checkpoint has besides weights: the source's tensor names and dtypes, config and tokenizer."""

from __future__ import annotations

import fnmatch
import json
import shutil
from pathlib import Path

from hybrid3d.families import Config, family_of
from hybrid3d.reshard.files import Entry, read_index, shard_entries

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".index.json")


# What a published checkpoint may carry and no model holds: buffers that are computed from the config.
COMPUTED = ("*.rotary_emb.inv_freq",)


def is_redundant(name: str, config: Config) -> bool:
    """Whether a tensor of a checkpoint says nothing: it is computed, or a second copy of a tied one."""
    tied_copy = name == "lm_head.weight" and bool(config.get("tie_word_embeddings"))
    return tied_copy or any(fnmatch.fnmatch(name, pattern) for pattern in COMPUTED)


def is_untrained(name: str, config: Config) -> bool:
    """Whether a tensor of a checkpoint is in no model here, and is carried from the source through every export."""
    return any(fnmatch.fnmatch(name, pattern) for pattern in family_of(config).untrained(config))


def export_entries(source: str | Path, config: Config) -> dict[str, Entry]:
    """The tensors of the checkpoint that the run started from, in its dtypes, dealt out to files anew."""
    found = {name: entry for name, entry in read_index(source).items() if not is_redundant(name, config)}
    return shard_entries({name: (entry.shape, entry.dtype) for name, entry in found.items()})


def copy_companions(source: str | Path, out: str | Path) -> None:
    """Copy the source's config, generation config and tokenizer: every plain file that holds no weights.

    What is exported is not quantized, so its config does not say so.
    """
    for path in Path(source).iterdir():
        if path.is_file() and not path.name.endswith(WEIGHTS):
            shutil.copy2(path, Path(out) / path.name)
    config = json.loads((Path(out) / "config.json").read_text())
    if config.pop("quantization_config", None):
        (Path(out) / "config.json").write_text(json.dumps(config, indent=2) + "\n")
