"""Which run a checkpoint or a record of a step is of, and what a resume may change.

Each manifest says it (`storage/manifest.py`), so that checkpoints of other runs and exchanged folders are refused.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid3d.config import Recipe, RecipeError, read_recipe, recipe_to_yaml
from hybrid3d.config.schema import flatten_settings, to_raw
from hybrid3d.inputs.files import input_files
from hybrid3d.run.folder import RunFolder, checkpoint_folder, checkpoint_steps, replace_file
from hybrid3d.storage.manifest import (
    BrokenCheckpoint,
    ForeignCheckpoint,
    Identity,
    content_digest,
    file_digest,
    read_identity,
)
from hybrid3d.storage.user_files import UnreadableFile, parse_yaml, read_json_file

# Settings that a resume may change, because they have no effect on results. `docs/run-folder.md` names them.
FREE = re.compile(
    r"tracking|run\.(max_restarts|optimizer_sharding)|roles\.generation\.(max_restarts|ranks_at_start)|roles\.reward\..*"
)
MAX_DIFFERENCES = 20  # lines of a message


@dataclass(frozen=True)
class RunId:
    """The run's id in `run.json`; checkpoints up to the step `unidentified` may be of a version that wrote none."""

    run: str
    unidentified: int = 0


@dataclass(frozen=True)
class RunIdentity:
    """What all checkpoints of a run have in common."""

    run: RunId
    recipe: Recipe
    inputs: Mapping[str, str]

    @classmethod
    def of_run(cls, folder: RunFolder, recipe: Recipe) -> RunIdentity:
        """Return the identity of a run whose folder has an id, with digests of the files that its recipe names."""
        run = read_run_id(folder)
        assert run is not None, "`begin` gives every run an id"
        return cls(run, recipe, input_digests(recipe))

    def of_step(self, folder: Path, updates: int) -> Identity:
        """Return what the manifest of a checkpoint or record after this many updates says."""
        yaml = recipe_to_yaml(self.recipe)
        return Identity(self.run.run, folder.name, updates, recipe_digest(self.recipe), yaml, dict(self.inputs))

    def check(self, folder: RunFolder, path: Path) -> str:
        """Check that a checkpoint is one that this run can resume; return as `check_origin`.

        Raises:
            ForeignCheckpoint: it is of another run or step, or of other settings or input files: with both values.
        """
        warning = check_origin(folder, path)
        identity = read_identity(path)
        if identity is None:
            return warning
        lines = [*_settings_that_differ(identity, self.recipe), *_inputs_that_differ(identity, self.inputs)]
        if lines:
            lines[MAX_DIFFERENCES:] = ["  ..."] if len(lines) > MAX_DIFFERENCES else []
            fix = "resume with what the checkpoint was written with, or choose another name"
            raise ForeignCheckpoint("\n".join([f"{path} was written with other settings or files:", *lines, fix]))
        return ""


def begin(folder: RunFolder) -> None:
    """Give the run in a folder an id, unless it has one already."""
    if read_run_id(folder) is None:
        earlier = checkpoint_steps(folder)
        content = {"run": secrets.token_hex(8), "unidentified": earlier[-1] if earlier else 0}
        replace_file(folder.id, json.dumps(content) + "\n")


def read_run_id(folder: RunFolder) -> RunId | None:
    """Return the id of the run in a folder, None if it has none; raise `RecipeError` if `run.json` is damaged."""
    if not folder.id.exists():
        return None
    try:
        read = read_json_file(folder.id)
        if isinstance(read, dict) and type(read.get("run")) is str and type(read.get("unidentified")) is int:
            return RunId(read["run"], read["unidentified"])
        problem = f'holds {read!r}, expected {{"run": id, "unidentified": step}}'
    except UnreadableFile as error:
        problem = error.why
    raise RecipeError(str(folder.id), [f"{problem}: restore it, or start another run"])


def check_origin(folder: RunFolder, path: Path) -> str:
    """Check that a checkpoint, or the record of a step, is of the run and the step that its path says.

    Returns:
        A warning if it does not say so, otherwise an empty text.

    Raises:
        ForeignCheckpoint: it is of another run or step; with both.
        BrokenCheckpoint: its manifest cannot be read.
    """
    identity, expected = read_identity(path), read_run_id(folder)
    step = int(path.name.removeprefix("step-"))
    if identity is None:
        if expected is not None and step > expected.unidentified:
            problem = f"{path} does not say which run it is of, expected {expected.run} ({folder.id})"
            raise ForeignCheckpoint(f"{problem}: this run's checkpoints say so: remove it, or put the run's own there")
        return f"{path} was written by a version that did not note run and step: taken for what its path says"
    for what, found, wanted in (
        ("folder", identity.folder, path.name),
        ("number of updates", identity.updates, step),
        ("run", identity.run, "none" if expected is None else expected.run),
    ):
        if found != wanted:
            missing = f"; {folder.id} is missing, copy it together with the run's checkpoints" * (expected is None)
            problem = f"{path} is of another run or step: its {what} is {found}, expected {wanted}{missing}"
            raise ForeignCheckpoint(f"{problem}: put the run's own checkpoint there, or remove it")
    return ""


def check_last(folder: RunFolder, recipe: Recipe) -> None:
    """Check the last checkpoint in a run's folder before ranks start; raises as `RunIdentity.check`.

    One whose manifest is damaged is left to the resume, which sets it aside.
    """
    steps = checkpoint_steps(folder)
    if steps:
        run = read_run_id(folder) or RunId("none", steps[-1])
        with _leaving_damage_to_others():
            RunIdentity(run, recipe, input_digests(recipe)).check(folder, checkpoint_folder(folder, steps[-1]))


def check_step(folder: RunFolder, step: int) -> str:
    """Check that the checkpoint of a step is of this run and step; raises and returns as `check_origin`.

    One whose manifest is damaged is left to other checks.
    """
    with _leaving_damage_to_others():
        return check_origin(folder, checkpoint_folder(folder, step))
    return ""


def derived_key(folder: RunFolder, step: int, recipe: Recipe) -> str:
    """Return a key of what is derived from a checkpoint and the model's files: other content has another key.

    `BrokenCheckpoint` is raised if the checkpoint's manifest cannot be read.
    """
    model = {key: digest for key, digest in input_digests(recipe).items() if key.startswith("model.path/")}
    content = [content_digest(checkpoint_folder(folder, step)), model]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


@contextmanager
def _leaving_damage_to_others() -> Iterator[None]:
    try:
        yield
    except ForeignCheckpoint:
        raise
    except BrokenCheckpoint:
        pass


def input_digests(recipe: Recipe) -> dict[str, str]:
    """Return a digest of each file that the recipe's paths name and training reads, by setting and file name."""
    return {key: file_digest(path) for key, path in input_files(recipe).items()}


def fixed_settings(recipe: Recipe) -> dict[str, Any]:
    """Return the settings that a resume must not change, by dotted key."""
    flat: dict[str, Any] = json.loads(json.dumps(flatten_settings(to_raw(recipe)), default=str))
    return {key: value for key, value in flat.items() if not FREE.fullmatch(key)}


def recipe_digest(recipe: Recipe) -> str:
    """Return a digest of the settings that a resume must not change."""
    return hashlib.sha256(json.dumps(fixed_settings(recipe), sort_keys=True).encode()).hexdigest()[:16]


def differing_keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return the keys whose settings differ; for a section that only one has, only the key of the section."""
    both = {**old, **new}
    sections = [f"{key}." for key in both if any(other.startswith(f"{key}.") for other in both)]
    return [
        key
        for key in both
        if (key not in old or key not in new or old[key] != new[key]) and not key.startswith(tuple(sections))
    ]


def format_setting(settings: Mapping[str, Any], key: str) -> str:
    """Return a setting as YAML would have it."""
    if key not in settings:
        return "a section" if any(other.startswith(f"{key}.") for other in settings) else "absent"
    return settings[key] if isinstance(settings[key], str) else json.dumps(settings[key], default=str)


def _settings_that_differ(identity: Identity, recipe: Recipe) -> Iterator[str]:
    """Yield a line for each setting; keys that the checkpoint's recipe lacks count as their defaults."""
    if identity.recipe_digest == recipe_digest(recipe):
        return
    try:
        raw = parse_yaml(identity.recipe)
        old = fixed_settings(read_recipe(raw, "the checkpoint's recipe", []))
    except ValueError as error:  # a setting of another version
        yield f"  its recipe has digest {identity.recipe_digest}, expected {recipe_digest(recipe)} ({error})"
        return
    new = fixed_settings(recipe)
    for key in differing_keys(old, new):
        yield f"  {key} is {format_setting(new, key)}, the checkpoint was written with {format_setting(old, key)}"


def _inputs_that_differ(identity: Identity, inputs: Mapping[str, str]) -> Iterator[str]:
    for name in sorted(identity.inputs.keys() | inputs.keys()):
        old, new = identity.inputs.get(name, "no such file"), inputs.get(name, "no such file")
        if old != new:
            yield f"  {name} has size and CRC {new}, the checkpoint was written with {old}"
