"""What can be known to be wrong before any rank starts, found there and said in one message."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from hybrid3d import distributed
from hybrid3d.config import ModelShape, Recipe, RecipeError, check_layout, load_recipe
from hybrid3d.config.schema import dotted
from hybrid3d.families import VALUE_HEAD, Config, family_of
from hybrid3d.inputs.chat_template import check_chat_template
from hybrid3d.inputs.checks import check_model
from hybrid3d.inputs.export import check_out, is_redundant, is_untrained
from hybrid3d.inputs.models import check_as_transformers, read_config, read_data, read_tokenizer
from hybrid3d.reshard.files import CheckpointError, CheckpointReader, TensorEntry, file_pieces, read_index
from hybrid3d.reshard.layout import Shape
from hybrid3d.rewards.environment_runner import check_environment
from hybrid3d.rewards.environments import stop_tokens
from hybrid3d.rewards.registry import check_references
from hybrid3d.rewards.scorer import check_reward
from hybrid3d.rl.data import ROWS_NAMED, DataError, PromptData
from hybrid3d.run.run_folder import RunFolder, checkpoint_folder
from hybrid3d.storage.manifest import check_sizes

MOST_TOLD = 20  # keys of a recipe that differ
TIED_CHUNK = 1 << 24  # elements compared at a time


def check_run(recipe: Recipe) -> None:
    """All that `train` needs: model, weights, data, reward, and a folder that is not another run's.

    Raises:
        CheckpointError, UnsupportedModel, DataError, RecipeError: with all that is wrong.
    """
    config = check_model(recipe)
    check_prompts(recipe, config)
    check_folder(recipe)
    check_weights(config, recipe)
    if recipe.algorithm.critic and recipe.critic.path is not None:
        check_scorer(recipe.critic.path, "critic.path", config, recipe)
    if recipe.reward.model is not None:
        check_scorer(recipe.reward.model, "reward.model", config, recipe)
    check_fit(recipe)


def check_prompts(recipe: Recipe, config: Config) -> None:
    """What answers are generated from and scored with: tokenizer, data, reward and environment.

    Raises:
        CheckpointError, DataError, RecipeError: as in `check_run`.
    """
    tokenizer = read_tokenizer(recipe)
    if recipe.data.chat_template:
        check_chat_template(recipe, tokenizer)
    train, held_out = read_data(recipe, config, tokenizer)
    try:
        check_reward(recipe.reward.name)
    except ValueError as error:
        raise RecipeError(recipe.name, [f"reward.name: {error}"]) from None
    check_data_references(recipe, train, held_out)
    if recipe.rollout is not None and recipe.rollout.environment is not None:
        try:
            stop_tokens(tokenizer, check_environment(recipe.rollout.environment))
        except ValueError as error:
            raise RecipeError(recipe.name, [f"rollout.environment: {error}"]) from None


def check_evaluation(recipe: Recipe, folder: RunFolder, step: int) -> None:
    """All that `eval` needs besides a fitting model, as far as it is seen without reading the checkpoint's weights.

    Raises:
        CheckpointError, DataError, RecipeError, BrokenCheckpoint: the first that is wrong.
    """
    check_sizes(checkpoint_folder(folder, step))
    read_index(recipe.model.path)
    check_prompts(recipe, read_config(recipe.model.path))
    folder.make_logs()


def check_export(recipe: Recipe, folder: RunFolder, step: int, out: Path) -> None:
    """All that `export` needs besides a fitting model. As `check_evaluation`."""
    check_out(out, recipe.model.path, read_config(recipe.model.path))
    check_sizes(checkpoint_folder(folder, step))
    folder.make_logs()


def check_data_references(recipe: Recipe, train: PromptData, held_out: PromptData) -> None:
    """The references that `reward.name` judges by must test something.

    Raises:
        DataError: with the file, the number of such rows and the first of them.
    """
    trained = [(recipe.data.train, train)] if recipe.algorithm.generates and recipe.reward.model is None else []
    judged = [(recipe.data.eval, held_out)] if recipe.rollout is not None else []
    for path, data in trained + judged:
        refused = check_references(recipe.reward.name, ((example.row, example.answer) for example in data.examples))
        if refused:
            first = [f"  row {row} (from 0): {reason}" for row, reason in list(refused.items())[:ROWS_NAMED]]
            said = (
                f"{path}: reward.name={recipe.reward.name} cannot judge by {len(refused)} of "
                f"{len(data.examples)} references in column {recipe.data.answer!r}: mend or remove these rows"
            )
            raise DataError("\n".join([said, *first, *["  ..."][: len(refused) > ROWS_NAMED]]))


def check_scorer(path: str, key: str, policy: Config, recipe: Recipe) -> None:
    """A checkpoint with a head of one number must fit the layout and read the policy's tokens.

    Raises:
        CheckpointError, UnsupportedModel, RecipeError: as in `check_run`.
    """
    from hybrid3d.train.probe import expected_shapes
    from hybrid3d.train.value_model import language_model

    config = language_model(read_config(path))
    family = family_of(config)
    check_as_transformers(Path(path) / "config.json", config, family)
    shape = ModelShape.from_config(config, experts=family.experts(config), latents=family.latents(config))
    check_layout(replace(recipe, rollout=None), shape, device=None)
    if config["vocab_size"] != policy["vocab_size"]:
        problem = f"{key}: {path} knows {config['vocab_size']} tokens, the policy {policy['vocab_size']}"
        raise RecipeError(recipe.name, [f"{problem}: it must have been trained with the policy's tokenizer"])
    longest = recipe.rollout.max_model_len if recipe.rollout is not None else 0
    if config["max_position_embeddings"] < longest:
        problem = f"{key}: {path} reads {config['max_position_embeddings']} tokens"
        raise RecipeError(recipe.name, [f"{problem}, rollout.max_model_len={longest}: lower that"])
    found = read_index(path)
    head = found.get(VALUE_HEAD)
    if head is None and key == "reward.model":
        raise CheckpointError(f"{path} has no {VALUE_HEAD}: a reward model is a sequence classifier of one label")
    if head is not None and head.shape != (1, config["hidden_size"]):
        wanted = [1, config["hidden_size"]]
        raise CheckpointError(f"{path}: {VALUE_HEAD} has shape {list(head.shape)}, one label takes {wanted}")
    layers = {name: shape for name, shape in expected_shapes(config).items() if name != "lm_head.weight"}
    heads = (VALUE_HEAD, "lm_head.weight")
    problems = list(_differences(layers, {n: entry for n, entry in found.items() if n not in heads}, config))
    if problems:
        raise CheckpointError("\n".join([f"{path} does not fit its config.json:", *problems]))


def check_folder(recipe: Recipe) -> None:
    """A folder that holds a run already must hold this one: it will be resumed.

    Raises:
        RecipeError: something in it is of another kind than a run writes, or its recipe is another: each key that
            differs, with both values.
    """
    from hybrid3d.run.live_settings import MUTABLE_SETTINGS

    folder = RunFolder.of(recipe)
    folder.check()
    if not folder.recipe.exists():
        return
    before, now = (dotted(asdict(one)) for one in (load_recipe(folder.recipe), recipe))
    keys = _differing(before, now)
    if not keys:
        return
    told = [f"  {key} is {_shown(now, key)}, the run began with {_shown(before, key)}" for key in keys]
    if len(told) > MOST_TOLD:
        told[MOST_TOLD:] = [f"  ... {len(told)} keys differ"]
    changing = [key for key in keys if any(fnmatchcase(key, pattern) for pattern in MUTABLE_SETTINGS)]
    fix = "resume with the values that it began with"
    if changing:
        fix += f" and write what a run may change ({', '.join(changing)}) to {folder.control}"
    problem = f"{folder.path} holds a run of another recipe ({folder.recipe}):"
    raise RecipeError(recipe.name, [problem, *told, f"{fix}; or choose another name, or remove the folder"])


def _differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The keys of settings that are not the same in both; for a section that only one has, the section's."""
    both = {**before, **now}
    sections = [f"{key}." for key in both if any(other.startswith(f"{key}.") for other in both)]
    return [
        key
        for key in both
        if (key not in before or key not in now or before[key] != now[key]) and not key.startswith(tuple(sections))
    ]


def _shown(settings: Mapping[str, Any], key: str) -> str:
    """A setting as YAML has it."""
    if key not in settings:
        return "a section" if any(other.startswith(f"{key}.") for other in settings) else "absent"
    return settings[key] if isinstance(settings[key], str) else json.dumps(settings[key], default=str)


def check_fit(recipe: Recipe) -> None:
    """Whether what ranks will hold fits the recipe's machine. Of ranks that are started already, rank 0 says so.

    A model whose weights are less than a hundredth of a GPU is not looked at: asking both engines takes seconds.

    Raises:
        RecipeError: it does not fit; with the numbers, and the nearest layouts that do.
    """
    from hybrid3d.planning.hardware import hardware_of
    from hybrid3d.planning.isolated import run_in_subprocess

    weights = sum(math.prod(entry.shape) for entry in read_index(recipe.model.path).values()) * 4
    small = 100 * weights <= hardware_of(recipe.machine).memory_bytes
    if recipe.rollout is None or small or (distributed.under_launcher() and distributed.rank() > 0):
        return
    misfit = json.loads(run_in_subprocess("hybrid3d.planning.fitting", recipe))
    if misfit is not None:
        raise RecipeError(*misfit)


def check_weights(config: Config, recipe: Recipe) -> None:
    """Hold the checkpoint's headers against what Megatron's own model of this config declares."""
    from hybrid3d.train.probe import expected_shapes

    found = read_index(recipe.model.path)
    problems = list(_differences(expected_shapes(config), found, config))
    if problems:
        raise CheckpointError("\n".join([f"{recipe.model.path} does not fit its config.json:", *problems]))
    check_tied_copy(recipe.model.path, config, found)


def _differences(expected: Mapping[str, Shape], found: Mapping[str, TensorEntry], config: Config) -> Iterator[str]:
    """A line for each of the first 20 tensors that are missing, of those that do not fit and of those too many."""
    missing = [
        f"{name}: missing, shape {list(shape)} expected" for name, shape in expected.items() if name not in found
    ]
    unlike = [
        f"{name}: shape {list(found[name].shape)}, config.json asks for {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name].shape != shape
    ]
    extra = found.keys() - expected.keys()
    unknown = [
        f"{name}: belongs to nothing in a {config['architectures'][0]}"
        for name in sorted(extra)
        if not is_redundant(name, config) and not is_untrained(name, config)
    ]
    for lines, what in ((missing, "missing"), (unlike, "of another shape"), (unknown, "too many")):
        yield from (f"  {line}" for line in lines[:20])
        if len(lines) > 20:
            yield f"  ... {len(lines)} tensors are {what}"


def check_tied_copy(folder: str, config: Config, found: Mapping[str, TensorEntry]) -> None:
    """A head that config.json ties to the embedding may be in the files too, if it is the same.

    Raises:
        CheckpointError: it is another, which transformers would use and both engines would not.
    """
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    if head not in found or not is_redundant(head, config):
        return
    whole = {piece.name: piece for piece in file_pieces({name: found[name] for name in (head, embedding)})}
    with CheckpointReader(folder, found) as reader:
        for box in whole[head].box.split(TIED_CHUNK):
            if not torch.equal(reader.read(whole[head].part(box)), reader.read(whole[embedding].part(box))):
                raise CheckpointError(
                    f"{folder}: config.json ties {head} to {embedding}, and the files have another {head}: "
                    "remove it from them, or set tie_word_embeddings to false"
                )
