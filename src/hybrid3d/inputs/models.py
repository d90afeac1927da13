"""Reads the files that a recipe names, except weights: the checkpoint's config and tokenizer, and the data."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from hybrid3d.config import Recipe
from hybrid3d.families import Config, Family, head_dim, query_groups, refuse_unsupported
from hybrid3d.families.values import abbreviate, config_problems
from hybrid3d.inputs.files import TOKENIZER_FILES
from hybrid3d.inputs.tokenizer_checks import check_tokenizer_files, read_end_tokens
from hybrid3d.reshard.file_index import INDEX_FILE, SINGLE_FILE, CheckpointError
from hybrid3d.rl.data import PromptData
from hybrid3d.rl.data_files import DataError
from hybrid3d.storage.user_files import UnreadableFile, check_regular_file, read_json_file

# Keys that every family needs; none of them has a default that all families share.
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
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


def read_config(folder: str | Path) -> dict[str, Any]:
    """Read a checkpoint's `config.json`, and check its values and those of `generation_config.json`.

    Raises:
        CheckpointError: one of both cannot be read or has values that cannot be used; names each of `config.json`.
        UnsupportedModel: it is of a family that is known and not supported; with what is missing.
    """
    path = Path(folder) / "config.json"
    config = _read_object(path)
    refuse_unsupported(config)
    named = config.get("transformers_weights")
    if named not in (None, SINGLE_FILE, INDEX_FILE):
        problem = f"{path}: transformers reads weights from transformers_weights={abbreviate(named)}"
        raise CheckpointError(f"{problem}, and training from {INDEX_FILE} or {SINGLE_FILE}: rename the files")
    missing = [key for key in REQUIRED if config.get(key) is None]
    if missing:
        raise CheckpointError(f"{path} lacks {', '.join(missing)}")
    problems = list(config_problems(config))
    if problems:
        lines = [f"{path} has values that cannot be used:", *(f"  {problem}" for problem in problems)]
        raise CheckpointError("\n".join(lines))
    _check_generation_config(folder, config["vocab_size"])
    return config


def _check_generation_config(folder: str | Path, vocab_size: int) -> None:
    """Check `generation_config.json` if it exists; vLLM reads the end tokens of answers from it."""
    path = Path(folder) / "generation_config.json"
    if not os.path.lexists(path):
        return
    config = _read_object(path)
    end_tokens = config.get("eos_token_id")
    for token in end_tokens if isinstance(end_tokens, list) else [] if end_tokens is None else [end_tokens]:
        if type(token) is not int or not 0 <= token < vocab_size:
            expected = f"expected a token from 0 to {vocab_size - 1}, or a list of tokens"
            problem = f"eos_token_id={abbreviate(end_tokens)}: {expected}"
            raise CheckpointError(f"{path}: {problem}; vocab_size in config.json is {vocab_size}")
    from transformers import GenerationConfig  # takes seconds, as do tokenizers, which not every command needs

    try:
        GenerationConfig.from_dict(copy.deepcopy(config))
    except Exception as error:  # the library raises many kinds of errors
        raise CheckpointError(f"{path} is refused by transformers: {_first_line(error)}") from None


def check_against_transformers(path: str | Path, config: Config, family: Family) -> None:
    """Compare our reading of a config with that of transformers, from which vLLM builds its model.

    Raises:
        CheckpointError: transformers refuses the config, or reads another model; with both values.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    named = config.get("model_type")
    kind = family.model_types.get(str(named), named)
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)
    if architecture != family.architecture:
        known = [key for key, value in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if value == family.architecture]
        problem = f"model_type={named!r} is transformers' name of {architecture or 'no language model'}"
        fitting = " or ".join(map(repr, (known[0], *family.model_types)))
        raise CheckpointError(f"{path}: {problem}, and architectures names {family.architecture}: set it to {fitting}")
    try:
        hf_config = CONFIG_MAPPING[kind].from_dict(copy.deepcopy({**config, "architectures": [architecture]}))
    except Exception as error:  # the library raises many kinds of errors
        raise CheckpointError(f"{path} is refused by transformers: {' '.join(str(error).split())[:500]}") from None
    for name, value, hf_value in _compared_values(config, family, hf_config):
        if value != hf_value:
            raise CheckpointError(
                f"{path}: {name} is {value!r} for training, and transformers and vLLM read {hf_value!r}"
            )


def _compared_values(config: Config, family: Family, hf_config: Any) -> Iterator[tuple[str, object, object]]:
    """Yield the name, our value and transformers' value of every setting that affects what a model computes."""
    yield from ((key, config[key], getattr(hf_config, key)) for key in REQUIRED)
    yield "tie_word_embeddings", bool(config.get("tie_word_embeddings", False)), hf_config.tie_word_embeddings
    yield "hidden_act", config.get("hidden_act") or "silu", hf_config.hidden_act
    experts, latents, rope = family.experts(config), family.latents(config), family.rope(config)
    if latents is None:
        default_head_dim = hf_config.hidden_size // hf_config.num_attention_heads
        yield "head_dim", head_dim(config), getattr(hf_config, "head_dim", None) or default_head_dim
        yield "num_key_value_heads", query_groups(config), hf_config.num_key_value_heads
    else:
        hf_latents = (
            hf_config.q_lora_rank or 0,
            hf_config.kv_lora_rank,
            hf_config.qk_nope_head_dim,
            hf_config.qk_rope_head_dim,
        )
        yield "latent attention", (latents.q_rank, latents.kv_rank, latents.nope, latents.rope), hf_latents
        yield "v_head_dim", latents.value, hf_config.v_head_dim
    if experts is not None:
        count = next(value for key in EXPERT_COUNTS if (value := getattr(hf_config, key, None)) is not None)
        yield "the number of experts", experts.count, count
        yield "num_experts_per_tok", experts.per_token, hf_config.num_experts_per_tok
    table = hf_config.rope_parameters
    yield "rope_theta", rope.theta, table.get("rope_theta")
    yield "partial_rotary_factor", rope.fraction, table.get("partial_rotary_factor", 1.0)
    kind = "llama3" if rope.llama3 is not None else "yarn" if rope.yarn is not None else "default"
    yield "rope_type", kind, table.get("rope_type")
    for key, value in {**(rope.llama3 or {}), **(rope.yarn or {})}.items():
        yield key, value, table.get(key)


def _read_object(path: Path) -> dict[str, Any]:
    """Read an object from a JSON file. CheckpointError: not readable, not JSON, or no object."""
    try:
        check_regular_file(path)
        value = read_json_file(path)
    except UnreadableFile as error:
        raise CheckpointError(str(error)) from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return value


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def read_tokenizer(recipe: Recipe) -> Any:
    """Read the checkpoint's tokenizer, and set its padding token if it has none.

    Raises:
        CheckpointError: there is no tokenizer, or it does not load.
        DataError: it has no EOS token.
    """
    folder = Path(recipe.model.path)
    if not any((folder / name).exists() for name in TOKENIZERS):
        own_code = "; tiktoken.model is there, whose reader is code of the checkpoint, which is not run: convert it"
        hint = own_code if (folder / "tiktoken.model").exists() else ""
        raise CheckpointError(f"{folder} has no tokenizer: none of {', '.join(TOKENIZERS)} is there{hint}")
    for file in (folder / name for name in TOKENIZER_FILES):
        if os.path.lexists(file):
            if file.suffix == ".json":
                _read_object(file)
                continue
            try:
                check_regular_file(file)
            except UnreadableFile as error:
                raise CheckpointError(str(error)) from None
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(recipe.model.path, trust_remote_code=False)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library's parsers raise many kinds of errors, including Rust panics
        raise CheckpointError(f"{folder} has no tokenizer that loads: {_first_line(error)}") from None
    check_tokenizer_files(folder, tokenizer)
    if tokenizer.eos_token_id is None:
        raise DataError(f"the tokenizer of {folder} has no EOS token: answers would never end")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token  # padding is masked, so any token works
    # Templates that write today's date call this function, which transformers would let say another one tomorrow
    today = datetime.fromisoformat(recipe.data.date).strftime
    tokenizer.apply_chat_template = functools.partial(tokenizer.apply_chat_template, strftime_now=today)
    return tokenizer


def read_data(recipe: Recipe, config: Config, tokenizer: Any) -> tuple[PromptData, dict[str, PromptData]]:
    """Read the training prompts, and the held-out ones by the names of their files: `eval` is that of `data.eval`.

    With `dpo` those of `data` are pairs. DataError: a file, a column or a row cannot be used.
    """
    rollout, data = recipe.rollout, recipe.data
    longest = config["max_position_embeddings"]
    limit = rollout.max_model_len - rollout.max_new_tokens if rollout else longest
    how: dict[str, Any] = dict(
        tokenizer=tokenizer,
        prompt=data.prompt,
        answer=data.answer,
        chat_template=data.chat_template,
        overlong=data.overlong,
        max_invalid_fraction=data.max_invalid_fraction,
        max_prompt_tokens=limit,
        seed=recipe.run.seed,
        end_tokens=read_end_tokens(Path(recipe.model.path)),
        remedy="raise rollout.max_model_len (or lower rollout.max_new_tokens), " if rollout else "",
    )
    of_data = of_train = how
    if recipe.algorithm.uses_pairs:
        of_data = of_train = how | dict(answer=data.chosen, rejected=data.rejected, max_tokens=longest, remedy="")
    elif recipe.algorithm.name == "sft":
        of_train = how | dict(max_tokens=longest)
    train, held_out = PromptData.read(data.train, **of_train), {"eval": PromptData.read(data.eval, **of_data)}
    held_out |= {name: PromptData.read(path, **how) for name, path in recipe.evaluation.data.items()}
    for name in ("eos_token", "pad_token"):
        where = f"{recipe.model.path}: {name} of the tokenizer"
        _check_tokens(where, (getattr(tokenizer, f"{name}_id"),), config, tokenizer)
    for prompts in (train, *held_out.values()):
        for example in prompts.examples:
            where = f"{prompts.path}: row {example.row} (from 0)"
            _check_tokens(where, example.prompt_ids, config, tokenizer)
            for tokens in example.trained:
                _check_trained(where, tokens, recipe, config, tokenizer)
    return train, held_out


def _check_trained(where: str, tokens: Sequence[int], recipe: Recipe, config: Config, tokenizer: Any) -> None:
    """Check a sequence of the data that is trained on. DataError: as `_check_tokens`, or no micro batch has room."""
    _check_tokens(f"{where}, answer", tokens, config, tokenizer)
    budget = recipe.train.max_tokens_per_micro_batch
    if budget is not None and len(tokens) > budget:
        raise DataError(
            f"{where}: prompt, answer and EOS are {len(tokens)} tokens, for which "
            f"train.max_tokens_per_micro_batch={budget} has no room: set it to {len(tokens)} or more"
        )


def _check_tokens(where: str, tokens: Sequence[int], config: Config, tokenizer: Any) -> None:
    """Check that the model has all tokens. DataError: it lacks one; with the token's text, and `where` it occurs."""
    largest, size = max(tokens), config["vocab_size"]
    if largest >= size:
        text = tokenizer.convert_ids_to_tokens(largest)
        raise DataError(
            f"{where}: the tokenizer makes token {largest}, {text!r}, and the model's vocab_size is {size}: use the "
            f"tokenizer that the model was trained with, or remove what was added to it (a model for this one has a "
            f"vocab_size of {largest + 1} or more)"
        )
