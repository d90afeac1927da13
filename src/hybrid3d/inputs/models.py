"""What a recipe points at, besides weights: the checkpoint's config and tokenizer, and the data."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, GenerationConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hybrid3d.config import Recipe
from hybrid3d.families import Config, Family, head_dim, query_groups
from hybrid3d.families.values import abbreviate, config_problems
from hybrid3d.reshard.files import CheckpointError
from hybrid3d.rl.data import DataError, PromptData, encode_pair
from hybrid3d.storage.user_files import UnreadableFile, check_regular_file, read_json_file

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
EXPERT_COUNTS = ("n_routed_experts", "num_local_experts", "num_experts")
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("tokenizer.model", "merges.txt", "chat_template.jinja"),
)
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


def read_config(folder: str | Path) -> dict[str, Any]:
    """A checkpoint's `config.json`, of values that every engine can use, and that transformers reads as we do.

    Raises:
        CheckpointError: it cannot be read, or some of its values cannot be used: names each.
    """
    path = Path(folder) / "config.json"
    config = _read_object(path)
    lacking = [key for key in REQUIRED if config.get(key) is None]
    if lacking:
        raise CheckpointError(f"{path} lacks {', '.join(lacking)}")
    problems = list(config_problems(config))
    if problems:
        raise CheckpointError("\n".join([f"{path} has values that cannot be used:", *(f"  {one}" for one in problems)]))
    check_generation_config(folder, config["vocab_size"])
    return config


def check_generation_config(folder: str | Path, vocab_size: int) -> None:
    """`generation_config.json`, of which vLLM takes the tokens that end an answer, where there is one.

    Raises:
        CheckpointError: no JSON object, or one that transformers does not read, or whose tokens the model lacks.
    """
    path = Path(folder) / "generation_config.json"
    if not os.path.lexists(path):
        return
    config = _read_object(path)
    ends = config.get("eos_token_id")
    for token in ends if isinstance(ends, list) else [] if ends is None else [ends]:
        if type(token) is not int or not 0 <= token < vocab_size:
            problem = f"eos_token_id={abbreviate(ends)}: expected tokens from 0 to {vocab_size - 1}, one or a list"
            raise CheckpointError(f"{path}: {problem}; vocab_size in config.json is {vocab_size}")
    try:
        GenerationConfig.from_dict(copy.deepcopy(config))
    except Exception as error:  # as many kinds as the library has checks
        raise CheckpointError(f"{path} is refused by transformers: {_first_line(error)}") from None


def check_against_transformers(path: str | Path, config: Config, family: Family) -> None:
    """Hold what we read of a config against what transformers reads, from which vLLM builds its model.

    Raises:
        CheckpointError: transformers does not read it, or reads another model; with both values.
    """
    kind = config.get("model_type")
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)
    if architecture != family.architecture:
        known = [name for name, its in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if its == family.architecture]
        problem = f"model_type={kind!r} is transformers' name of {architecture or 'no language model'}"
        raise CheckpointError(
            f"{path}: {problem}, and architectures names {family.architecture}: set it to {known[0]!r}"
        )
    try:
        theirs = CONFIG_MAPPING[kind].from_dict(copy.deepcopy({**config, "architectures": [architecture]}))
    except Exception as error:  # as many kinds as the library has checks
        raise CheckpointError(f"{path} is refused by transformers: {' '.join(str(error).split())[:500]}") from None
    for what, ours, read in _compared_values(config, family, theirs):
        if ours != read:
            raise CheckpointError(f"{path}: {what} is {ours!r} for training, and transformers and vLLM read {read!r}")


def _compared_values(config: Config, family: Family, theirs: Any) -> Iterator[tuple[str, object, object]]:
    """Name, our value and transformers' of everything that decides what a model computes."""
    yield from ((key, config[key], getattr(theirs, key)) for key in REQUIRED)
    yield "tie_word_embeddings", bool(config.get("tie_word_embeddings", False)), theirs.tie_word_embeddings
    yield "hidden_act", config.get("hidden_act") or "silu", theirs.hidden_act
    experts, latents, rope = family.experts(config), family.latents(config), family.rope(config)
    if latents is None:
        of_heads = theirs.hidden_size // theirs.num_attention_heads
        yield "head_dim", head_dim(config), getattr(theirs, "head_dim", None) or of_heads
        yield "num_key_value_heads", query_groups(config), theirs.num_key_value_heads
    else:
        its = (theirs.q_lora_rank or 0, theirs.kv_lora_rank, theirs.qk_nope_head_dim, theirs.qk_rope_head_dim)
        yield "latent attention", (latents.q_rank, latents.kv_rank, latents.nope, latents.rope), its
        yield "v_head_dim", latents.value, theirs.v_head_dim
    if experts is not None:
        count = next(value for key in EXPERT_COUNTS if (value := getattr(theirs, key, None)) is not None)
        yield "the number of experts", experts.count, count
        yield "num_experts_per_tok", experts.per_token, theirs.num_experts_per_tok
    table = theirs.rope_parameters
    yield "rope_theta", rope.theta, table.get("rope_theta")
    kind = "llama3" if rope.llama3 is not None else "yarn" if rope.yarn is not None else "default"
    yield "rope_type", kind, table.get("rope_type")
    for key, value in {**(rope.llama3 or {}), **(rope.yarn or {})}.items():
        yield key, value, table.get(key)


def _read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file. CheckpointError: not readable, not JSON, or no object."""
    _check_regular(path)
    try:
        found = read_json_file(path)
    except UnreadableFile as error:
        raise CheckpointError(str(error)) from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return found


def _check_regular(path: Path) -> None:
    try:
        check_regular_file(path)
    except UnreadableFile as error:
        raise CheckpointError(str(error)) from None


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def read_tokenizer(recipe: Recipe) -> Any:
    """The checkpoint's tokenizer, with an end and a padding token; CheckpointError where there is none."""
    folder = Path(recipe.model.path)
    if not any((folder / name).exists() for name in TOKENIZERS):
        raise CheckpointError(f"{folder} has no tokenizer: none of {', '.join(TOKENIZERS)} is there")
    for name in TOKENIZER_FILES:
        if os.path.lexists(folder / name):
            if name.endswith(".json"):
                _read_object(folder / name)
            else:
                _check_regular(folder / name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(recipe.model.path, trust_remote_code=False)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a broken file fails in as many ways as the library has parsers, panics included
        raise CheckpointError(f"{folder} has no tokenizer that loads: {_first_line(error)}") from None
    if tokenizer.eos_token_id is None:
        raise DataError(f"the tokenizer of {folder} has no EOS token: answers would never end")
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
            max_invalid_fraction=data.max_invalid_fraction,
            max_prompt_tokens=limit,
            seed=recipe.run.seed,
        )

    both = read(data.train), read(data.eval)
    _check_special_tokens(recipe, config, tokenizer)
    for path, found in zip((data.train, data.eval), both, strict=True):
        for example in found.examples:
            _check_tokens(f"{path}: row {example.row} (from 0)", example.prompt_ids, config, tokenizer)
    if not recipe.algorithm.generates:
        for example in both[0].examples:
            tokens, _ = encode_pair(tokenizer, example, config["max_position_embeddings"])
            _check_tokens(f"{data.train}: row {example.row} (from 0), answer", tokens, config, tokenizer)
    return both


def _check_special_tokens(recipe: Recipe, config: Config, tokenizer: Any) -> None:
    for name in ("eos_token", "pad_token"):
        where = f"{recipe.model.path}: {name} of the tokenizer"
        _check_tokens(where, (getattr(tokenizer, f"{name}_id"),), config, tokenizer)


def _check_tokens(where: str, tokens: Sequence[int], config: Config, tokenizer: Any) -> None:
    """DataError: the model has no such token; with its text, and where it stands."""
    largest, size = max(tokens), config["vocab_size"]
    if largest >= size:
        text = tokenizer.convert_ids_to_tokens(largest)
        raise DataError(
            f"{where}: the tokenizer makes token {largest}, {text!r}, and the model's vocab_size is {size}: use the "
            f"tokenizer that the model was trained with, or remove what was added to it (a model for this one has a "
            f"vocab_size of {largest + 1} or more)"
        )
