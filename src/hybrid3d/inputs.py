"""What a recipe points at, besides weights: the checkpoint's config and tokenizer, and the data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from hybrid3d.config import Recipe
from hybrid3d.families import Config
from hybrid3d.reshard.files import CheckpointError
from hybrid3d.rl.data import DataError, PromptData, encode_pair

# What every family computes with; none of it has a default that all of them share.
REQUIRED = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "rms_norm_eps",
    "vocab_size",
    "max_position_embeddings",
)
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


def read_config(folder: str | Path) -> dict[str, Any]:
    """A checkpoint's `config.json`; CheckpointError where it cannot be read."""
    path = Path(folder) / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    lacking = [key for key in REQUIRED if key not in config]
    if lacking:
        raise CheckpointError(f"{path} lacks {', '.join(lacking)}")
    return config


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def read_tokenizer(recipe: Recipe) -> Any:
    """The checkpoint's tokenizer, with an end and a padding token; CheckpointError where there is none."""
    if not any((Path(recipe.model.path) / name).exists() for name in TOKENIZERS):
        raise CheckpointError(f"{recipe.model.path} has no tokenizer: none of {', '.join(TOKENIZERS)} is there")
    try:
        tokenizer = AutoTokenizer.from_pretrained(recipe.model.path, trust_remote_code=False)
    except Exception as error:  # a broken file fails in as many ways as the library has parsers
        raise CheckpointError(f"{recipe.model.path} has no tokenizer that loads: {_first_line(error)}") from None
    if tokenizer.eos_token_id is None:
        raise DataError(f"the tokenizer of {recipe.model.path} has no EOS token: answers would never end")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token  # padding is masked out, so any token will do
    return tokenizer


def read_data(recipe: Recipe, config: Config, tokenizer: Any) -> tuple[PromptData, PromptData]:
    """The training and the held-out prompts; DataError where a file, a column or a row cannot be used."""
    rollout, data = recipe.rollout, recipe.data
    limit = rollout.max_model_len - rollout.max_new_tokens if rollout else config["max_position_embeddings"]

    def read(path: str) -> PromptData:
        return PromptData.read(
            path,
            tokenizer,
            prompt=data.prompt,
            answer=data.answer,
            chat_template=data.chat_template,
            overlong=data.overlong,
            max_broken=data.max_broken,
            max_prompt_tokens=limit,
            seed=recipe.run.seed,
        )

    both = read(data.train), read(data.eval)
    if not recipe.algorithm.generates:
        for example in both[0].examples:
            encode_pair(tokenizer, example, config["max_position_embeddings"])
    largest = max(
        tokenizer.eos_token_id, tokenizer.pad_token_id, *(max(e.prompt_ids) for d in both for e in d.examples)
    )
    if largest >= config["vocab_size"]:
        raise DataError(f"the tokenizer makes token {largest}, the model's vocab_size is {config['vocab_size']}")
    return both
