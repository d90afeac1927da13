"""The files of a Hugging Face checkpoint that are known, and those that a recipe's paths name."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from hybrid3d.config import Recipe
from hybrid3d.reshard.file_index import ADAPTER_FILE, INDEX_FILE, SINGLE_FILE, CheckpointError, read_index
from hybrid3d.storage.user_files import UnreadableFile, read_json_file

CONFIG_FILES = ("config.json", "generation_config.json")
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("tokenizer.model", "merges.txt", "chat_template.jinja"),
)
OTHER_TOKENIZER_FILES = (  # of tokenizers with code of their own, and of older ones
    *("vocab.txt", "spiece.model", "sentencepiece.bpe.model", "tokenizer.model.v3", "tekken.json", "tiktoken.model"),
    *("chat_template.json",),
)
TEMPLATES = "additional_chat_templates"  # a folder of templates by name, `NAME.jinja`
TEXTS = ("LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*", "README*")
CODE = "*.py"  # of a checkpoint with code of its own, which is copied and never run


def files_to_copy(source: str | Path) -> Iterator[Path]:
    """Yield the files that an export copies, relative to the checkpoint's folder: all that are known but for weights.

    Other files are left out, because they may hold old weights, or say something about them.
    """
    source = Path(source)
    known = (*CONFIG_FILES, *TOKENIZER_FILES, *OTHER_TOKENIZER_FILES, *TEXTS, *((CODE,) if _has_code(source) else ()))
    for path in sorted(source.iterdir()):
        if path.is_file() and any(fnmatch.fnmatchcase(path.name, pattern) for pattern in known):
            yield path.relative_to(source)
    for path in sorted((source / TEMPLATES).glob("*.jinja")):
        if path.is_file():
            yield path.relative_to(source)


def _has_code(source: Path) -> bool:
    """Return whether a config names classes in files of the checkpoint."""
    return any("auto_map" in read_object(source / name) for name in ("config.json", "tokenizer_config.json"))


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, empty without one; other checks report a file that is damaged."""
    with suppress(UnreadableFile):
        content = read_json_file(path)
        if isinstance(content, dict):
            return content
    return {}


def input_files(recipe: Recipe) -> dict[str, Path]:
    """Return the files that a run reads by the recipe's paths, by setting and name within its folder.

    Files that do not exist are left out, and so are rewards, environments and agents, which are code.
    """
    models = {
        "model.path": recipe.model.path,
        "algorithm.kl.reference": recipe.algorithm.kl.reference,
        "critic.path": recipe.critic.path,
        "reward.model": recipe.reward.model,
    }
    found = {
        f"{key}/{name}": Path(folder) / name
        for key, folder in models.items()
        if folder is not None
        for name in (*CONFIG_FILES, *TOKENIZER_FILES, INDEX_FILE, *_weights_files(folder, SINGLE_FILE))
    }
    if recipe.lora is not None and recipe.lora.path is not None:
        adapters = ("adapter_config.json", *_weights_files(recipe.lora.path, ADAPTER_FILE))
        found |= {f"lora.path/{name}": Path(recipe.lora.path) / name for name in adapters}
    found |= {"data.train": Path(recipe.data.train), "data.eval": Path(recipe.data.eval)}
    found |= {f"evaluation.data.{name}": Path(path) for name, path in recipe.evaluation.data.items()}
    return {key: path for key, path in found.items() if path.is_file()}


def _weights_files(folder: str, single_file: str) -> list[str]:
    try:
        return sorted({entry.file for entry in read_index(folder, single_file).values()})
    except CheckpointError:  # other checks report it
        return []
