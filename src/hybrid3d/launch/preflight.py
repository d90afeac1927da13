"""Checks before any rank starts, which report everything that is wrong in one message."""

from __future__ import annotations

import importlib.util
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import torch

from hybrid3d import launch_environment
from hybrid3d.config import ModelShape, Recipe, RecipeError, check_layout, load_recipe
from hybrid3d.config.schema import flatten_settings, to_raw
from hybrid3d.errors import UserMistake
from hybrid3d.families import VALUE_HEAD, Config, family_of
from hybrid3d.generation.agents.program import find_agent_problems
from hybrid3d.generation.stops import check_stops
from hybrid3d.inputs.adapters import check_adapters
from hybrid3d.inputs.checks import check_model
from hybrid3d.inputs.completions import check_server
from hybrid3d.inputs.export import check_output_folder, is_redundant
from hybrid3d.inputs.models import check_against_transformers, read_config, read_data, read_tokenizer
from hybrid3d.inputs.tokenizer_checks import check_chat_template
from hybrid3d.launch_environment import check_vllm_variables
from hybrid3d.reshard.file_index import CheckpointError, TensorEntry, read_index
from hybrid3d.reshard.files import CheckpointReader, file_pieces
from hybrid3d.reshard.move.nixl_agent import load_nixl
from hybrid3d.reshard.plan.layout import Shape
from hybrid3d.rl.data import MAX_ROWS_IN_MESSAGE, PromptData
from hybrid3d.rl.data_files import DataError
from hybrid3d.run.folder import RunFolder, checkpoint_folder, recorded_folder
from hybrid3d.run.identity import FREE, check_last, check_origin, differing_keys, format_setting
from hybrid3d.run.live_settings import MUTABLE_SETTINGS
from hybrid3d.run.trackers import find_problems
from hybrid3d.scoring.functions import check_references
from hybrid3d.scoring.scorer import check_reward
from hybrid3d.storage.manifest import check_sizes, read_manifest

MAX_DIFFERENCES = 20  # differing keys of two recipes that a message lists
TIED_CHUNK = 1 << 24  # elements compared at a time


def check_ray(recipe: Recipe) -> None:
    """Check that Ray is installed; raise `RecipeError` if it is not."""
    if importlib.util.find_spec("ray") is None:
        raise RecipeError(recipe.name, ["--ray needs the package ray: pip install 'hybrid3d[ray]'"])


def check_run(recipe: Recipe) -> None:
    """Check everything that `train` needs: model, weights, data, reward, and a folder that is not another run's.

    Raises:
        CheckpointError, UnsupportedModel, DataError, RecipeError: by the first check that fails, with all its problems.
        UserMistake: an environment variable of vLLM's has a value that is not supported.
    """
    for mistake in find_mistakes(recipe):
        raise mistake


def find_mistakes(recipe: Recipe) -> Iterator[UserMistake]:
    """Yield the error of each check of `check_run` that fails; those that need a valid model are left out without."""
    config: Config | None = None
    if recipe.rollout is not None:
        yield from _mistake_of(check_vllm_variables)
    try:
        config = check_model(recipe)
    except UserMistake as mistake:
        yield mistake
    if config is not None:
        yield from _mistake_of(check_prompts, recipe, config)
    yield from _mistake_of(check_folder, recipe)
    if config is not None:
        yield from _mistake_of(check_weights, config, recipe.model.path, recipe.train.mtp_loss_coef > 0)
        if recipe.lora is not None:
            yield from _mistake_of(check_adapters, recipe)
        if recipe.algorithm.kl.reference is not None:
            yield from _mistake_of(check_reference, config, recipe)
        if (url := recipe.algorithm.kl.endpoint) is not None:
            yield from _mistake_of(check_server, url, "algorithm.kl.endpoint", config["vocab_size"])
        if recipe.algorithm.uses_critic and recipe.critic.path is not None:
            yield from _mistake_of(check_scorer, recipe.critic.path, "critic.path", config, recipe)
        if recipe.reward.model is not None:
            with_layout = replace(recipe, train=recipe.reward_layout)
            yield from _mistake_of(check_scorer, recipe.reward.model, "reward.model", config, with_layout)
        yield from _mistake_of(check_fit, recipe)
    if recipe.sync.transport == "nixl":
        yield from _mistake_of(load_nixl)
    yield from _mistake_of(check_trackers, recipe)


def _mistake_of(check: Callable[..., object], *arguments: object) -> Iterator[UserMistake]:
    try:
        check(*arguments)
    except UserMistake as mistake:
        yield mistake


def check_trackers(recipe: Recipe) -> None:
    """Check that the recipe's trackers have what they need; raise `RecipeError` if one has not."""
    problems = find_problems(recipe.tracking)
    if problems:
        raise RecipeError(recipe.name, [f"tracking: {problem}" for problem in problems])


def check_prompts(recipe: Recipe, config: Config) -> None:
    """Check what making and scoring answers needs: tokenizer, data, reward and environment; raises as `check_run`."""
    tokenizer = read_tokenizer(recipe)
    if recipe.data.chat_template:
        check_chat_template(recipe, tokenizer)
    train, held_out = read_data(recipe, config, tokenizer)
    try:
        check_reward(recipe.reward.name)
    except ValueError as error:
        raise RecipeError(recipe.name, [f"reward.name: {error}"]) from None
    check_data_references(recipe, train, held_out)
    if recipe.rollout is not None and recipe.rollout.agents is not None:
        problems = find_agent_problems(recipe.rollout.agents)
        if problems:
            raise RecipeError(recipe.name, problems)
        if tokenizer.chat_template:
            check_chat_template(recipe, tokenizer)
    check_stops(recipe, tokenizer)


def check_evaluation(recipe: Recipe, folder: RunFolder, step: int) -> None:
    """Check everything that `eval` needs besides a valid model, without reading the checkpoint's weights.

    Raises:
        CheckpointError, DataError, RecipeError, BrokenCheckpoint, UserMistake: for the first check that fails.
    """
    check_vllm_variables()
    check_sizes(checkpoint_folder(folder, step))
    read_index(recipe.model.path)
    check_prompts(recipe, read_config(recipe.model.path))
    folder.make_logs()


def check_export(recipe: Recipe, folder: RunFolder, step: int, out: Path) -> None:
    """Check everything that `export` needs besides a valid model; raises as `check_evaluation`."""
    check_output_folder(out, recipe.model.path, read_config(recipe.model.path))
    check_sizes(checkpoint_folder(folder, step))
    folder.make_logs()


def check_replay(recipe: Recipe, folder: RunFolder, start: int, step: int) -> None:
    """Check everything that a replay from `start` to `step` needs, without reading arrays or weights.

    Raises:
        CheckpointError, RecipeError, UnsupportedModel, BrokenCheckpoint, UserMistake: for the first check that fails.
    """
    check_model(recipe)
    read_index(recipe.model.path)
    read_tokenizer(recipe)
    if start:
        check_sizes(checkpoint_folder(folder, start))
        check_origin(folder, checkpoint_folder(folder, start))
    for number in range(start, step + 1):
        read_manifest(recorded_folder(folder, number))
        check_origin(folder, recorded_folder(folder, number))
    folder.make_logs()


def check_data_references(recipe: Recipe, train: PromptData, held_out: Mapping[str, PromptData]) -> None:
    """Check that `reward.name` can use all references in the data.

    Raises:
        DataError: it cannot; with the file, the number of such rows and the first of them.
    """
    train_files = [(recipe.data.train, train)] if recipe.algorithm.generates and recipe.reward.model is None else []
    eval_files = [(data.path, data) for data in held_out.values()] if recipe.rollout is not None else []
    for path, data in train_files + eval_files:
        refused = check_references(recipe.reward.name, ((example.row, example.answer) for example in data.examples))
        if refused:
            first = [f"  row {row} (from 0): {reason}" for row, reason in list(refused.items())[:MAX_ROWS_IN_MESSAGE]]
            column = recipe.data.chosen if data.examples[0].rejected_ids else recipe.data.answer
            message = (
                f"{path}: reward.name={recipe.reward.name} cannot use {len(refused)} of "
                f"{len(data.examples)} references in column {column!r}: fix or remove these rows"
            )
            raise DataError("\n".join([message, *first, *["  ..."][: len(refused) > MAX_ROWS_IN_MESSAGE]]))


def check_reference(policy: Config, recipe: Recipe) -> None:
    """Check the checkpoint of a reference policy: it must fit the train layout and read the policy's tokens.

    Arguments and errors are as for `check_scorer`.
    """
    path = recipe.algorithm.kl.reference
    assert path is not None, "called where the recipe has one"
    config = read_config(path)
    try:
        _check_reads_tokens(path, "algorithm.kl.reference", config, policy, recipe)
    except RecipeError as error:
        raise RecipeError(f"algorithm.kl.reference {path}", error.problems) from None
    check_weights(config, path)


def _check_reads_tokens(path: str, key: str, config: Config, policy: Config, recipe: Recipe) -> None:
    """Check that a model beside the policy fits the train layout, and reads sequences of the policy's tokens."""
    check_against_transformers(Path(path) / "config.json", config, family_of(config))
    train = replace(recipe.train, router_replay="none")  # which is the policy's alone
    check_layout(replace(recipe, rollout=None, train=train), ModelShape.of(config), device=None)
    if config["vocab_size"] != policy["vocab_size"]:
        problem = f"{key}: {path} has a vocabulary of {config['vocab_size']} tokens, the policy {policy['vocab_size']}"
        raise RecipeError(recipe.name, [f"{problem}: it must have been trained with the policy's tokenizer"])
    max_model_len = recipe.rollout.max_model_len if recipe.rollout is not None else 0
    if config["max_position_embeddings"] < max_model_len:
        problem = f"{key}: {path} reads at most {config['max_position_embeddings']} tokens"
        raise RecipeError(recipe.name, [f"{problem}, fewer than rollout.max_model_len={max_model_len}: lower that"])


def check_scorer(path: str, key: str, policy: Config, recipe: Recipe) -> None:
    """Check the checkpoint of a reward model or critic: it must fit its layout and read the policy's tokens.

    Args:
        key: the setting with that path, for messages.
        policy: the policy's `config.json`.

    Raises:
        CheckpointError, UnsupportedModel, RecipeError: as in `check_run`.
    """
    from hybrid3d.train.megatron.probe import expected_shapes
    from hybrid3d.train.megatron.value_model import language_model

    config = language_model(read_config(path))
    try:
        _check_reads_tokens(path, key, config, policy, recipe)
    except RecipeError as error:
        if key != "reward.model" or recipe.roles.reward.ranks is None:
            raise
        problems = [re.sub(r"\btrain\.(tp|pp|ep)\b", r"roles.reward.\1", problem) for problem in error.problems]
        raise RecipeError(f"{key} {path}", problems) from None
    entries = read_index(path)
    head = entries.get(VALUE_HEAD)
    kind = next(iter(config.get("architectures") or ()), "")
    if head is None and (key == "reward.model" or kind.endswith("Classification")):
        raise CheckpointError(f"{path} has no {VALUE_HEAD}: a reward model is a sequence classifier with one label")
    if head is not None and head.shape != (1, config["hidden_size"]):
        expected = [1, config["hidden_size"]]
        raise CheckpointError(f"{path}: {VALUE_HEAD} has shape {list(head.shape)}, expected {expected} for one label")
    layers = {name: shape for name, shape in expected_shapes(config).items() if name != "lm_head.weight"}
    heads = (VALUE_HEAD, "lm_head.weight")
    _check_tensors(path, layers, {n: entry for n, entry in entries.items() if n not in heads}, config)


def check_folder(recipe: Recipe) -> None:
    """Check that the folder has no run yet, or a run of the same recipe, which will be resumed.

    Raises:
        RecipeError: the folder contains something else than a run, or a run of another recipe: each key that differs,
            with both values.
        ForeignCheckpoint: its last checkpoint is of another run or step, or of other settings or files.
    """
    folder = RunFolder.for_recipe(recipe)
    folder.check()
    if not folder.recipe.exists():
        return
    old, new = (flatten_settings(to_raw(r)) for r in (load_recipe(folder.recipe), recipe))
    keys = [key for key in differing_keys(old, new) if not FREE.fullmatch(key)]
    if not keys:
        if not launch_environment.under_launcher() or launch_environment.rank() == 0:
            check_last(folder, recipe)
        return
    lines = [f"  {key} is {format_setting(new, key)}, the run started with {format_setting(old, key)}" for key in keys]
    if len(lines) > MAX_DIFFERENCES:
        lines[MAX_DIFFERENCES:] = [f"  ... {len(lines)} keys differ"]
    mutable = [key for key in keys if any(fnmatchcase(key, pattern) for pattern in MUTABLE_SETTINGS)]
    fix = "resume with the original values"
    if mutable:
        fix += f" and write those that may change during a run ({', '.join(mutable)}) to {folder.control}"
    problem = f"{folder.path} holds a run of another recipe ({folder.recipe}):"
    raise RecipeError(recipe.name, [problem, *lines, f"{fix}; or choose another name, or remove the folder"])


def check_fit(recipe: Recipe) -> None:
    """Check that the memory that ranks need fits the recipe's machine; under a launcher, only rank 0 checks.

    Models whose weights are less than a hundredth of a GPU's memory are skipped, because querying both engines takes
    seconds.

    Raises:
        RecipeError: it does not fit; with the numbers, and the nearest layouts that do.
    """
    from hybrid3d.planning.agreed_placement import run_in_subprocess
    from hybrid3d.planning.hardware import hardware_of

    weights = sum(math.prod(entry.shape) for entry in read_index(recipe.model.path).values()) * 4
    is_small = 100 * weights <= hardware_of(recipe.machine).memory_bytes
    if recipe.rollout is None or is_small or (launch_environment.under_launcher() and launch_environment.rank() > 0):
        return
    misfit = json.loads(run_in_subprocess("hybrid3d.planning.fitting", recipe))
    if misfit is not None:
        raise RecipeError(*misfit)


def check_weights(config: Config, path: str, with_mtp: bool = False) -> None:
    """Check that the checkpoint's headers have the tensors that Megatron's model of this config declares.

    Raises:
        CheckpointError: tensors are missing, unknown or of another shape.
    """
    from hybrid3d.train.megatron.probe import expected_shapes

    entries = read_index(path)
    _check_tensors(path, expected_shapes(config, with_mtp), entries, config)
    check_tied_copy(path, config, entries)


def _check_tensors(
    path: str, expected: Mapping[str, Shape], entries: Mapping[str, TensorEntry], config: Config
) -> None:
    """Raise `CheckpointError` with the first 20 tensors that are missing, of another shape, and unknown."""
    missing = [
        f"{name}: missing, expected shape {list(shape)}" for name, shape in expected.items() if name not in entries
    ]
    mismatched = [
        f"{name}: shape {list(entries[name].shape)}, config.json requires {list(shape)}"
        for name, shape in expected.items()
        if name in entries and entries[name].shape != shape
    ]
    extra = entries.keys() - expected.keys()
    unknown = [
        f"{name}: not a tensor of {config['architectures'][0]}"
        for name in sorted(extra)
        if not is_redundant(name, config) and not family_of(config).is_mtp(name, config)
    ]
    problems: list[str] = []
    for lines, kind in ((missing, "missing"), (mismatched, "of another shape"), (unknown, "unknown")):
        problems += [f"  {line}" for line in lines[:20]]
        if len(lines) > 20:
            problems.append(f"  ... {len(lines)} tensors are {kind}")
    if problems:
        raise CheckpointError("\n".join([f"{path} does not fit its config.json:", *problems]))


def check_tied_copy(folder: str, config: Config, entries: Mapping[str, TensorEntry]) -> None:
    """Check that a head that config.json ties to the embedding, if the files contain it too, equals the embedding.

    If it differs, `CheckpointError` is raised: transformers would use it, and both engines would not.
    """
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    if head not in entries or not is_redundant(head, config):
        return
    pieces = {piece.name: piece for piece in file_pieces({name: entries[name] for name in (head, embedding)})}
    with CheckpointReader(folder, entries) as reader:
        for box in pieces[head].box.split(TIED_CHUNK):
            if not torch.equal(reader.read(pieces[head].restrict(box)), reader.read(pieces[embedding].restrict(box))):
                raise CheckpointError(
                    f"{folder}: config.json ties {head} to {embedding}, but the files have a different {head}: "
                    "remove it from them, or set tie_word_embeddings to false"
                )
