"""Changes settings during a run, at a step of the recipe's `schedule` or by the folder's `control.yaml`."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from hybrid3d.config import Recipe, RecipeError, read_recipe
from hybrid3d.config.load import with_settings
from hybrid3d.config.schema import flatten_settings, to_raw
from hybrid3d.distributed import broadcast_object
from hybrid3d.errors import UserMistake
from hybrid3d.inputs.checks import check_model
from hybrid3d.storage.user_files import MAX_TEXT_BYTES, UnreadableFile, parse_yaml, read_bytes

if TYPE_CHECKING:
    from hybrid3d.run.logger import RunLogger

MUTABLE_SETTINGS = (
    "algorithm.clip",
    "algorithm.clip_high",
    "algorithm.dual_clip",
    "algorithm.entropy_coef",
    "algorithm.kl.coef",
    "algorithm.kl.target",
    "algorithm.correction.*",
    "algorithm.dynamic_sampling",
    "optimizer.lr",
    "critic.optimizer.lr",
    "run.steps",
    "run.eval_every",
    "run.checkpoint_every",
    "run.keep_last",
    "run.record",
    "sync.verify",
    "roles.generation.active_ranks",
    "rollout.temperature",
    "rollout.top_p",
    "rollout.top_k",
    "rollout.min_p",
    "evaluation.samples",
    "evaluation.temperature",
    "evaluation.top_p",
    "evaluation.k",
    "train.micro_batch_size",
    "train.max_tokens_per_micro_batch",
    "guard.*",
)

STABLE_SECONDS = 0.5  # an edited file is read once it has not changed for this long
STABLE_TRIES = 20

Settings = Mapping[str, Any]
"""Values by dotted keys of a recipe."""


def settings_of(recipe: Recipe) -> dict[str, Any]:
    """Return all settings of a recipe by dotted key; an absent section is None."""
    return flatten_settings(to_raw(recipe))


def override_settings(recipe: Recipe, settings: Settings) -> Recipe:
    """Return the recipe with these settings replaced; raises `RecipeError` with all problems of the result."""
    problems: list[str] = []
    raw = with_settings(to_raw(recipe), settings, problems)
    return read_recipe(raw, recipe.name, problems)


def apply_settings(recipe: Recipe, settings: Settings, step: int) -> Recipe:
    """Return the recipe from `step` on, after changing these settings during a run.

    Raises:
        RecipeError: a setting cannot change during a run, or the resulting recipe is invalid; with all problems.
    """
    problems, known = [], settings_of(recipe)
    for key in settings:
        section = key.rpartition(".")[0]
        if not any(fnmatchcase(key, pattern) for pattern in MUTABLE_SETTINGS):
            problems.append(f"{key}: cannot change during a run; these can: {', '.join(MUTABLE_SETTINGS)}")
        elif section in known:
            problems.append(f"{key}: the recipe has no section {section}, which cannot be added during a run")
    if problems:
        raise RecipeError(recipe.name, problems)
    new = override_settings(recipe, settings)
    if "run.steps" in settings and new.run.steps <= step:
        problems.append(f"run.steps={new.run.steps}: the next step is {step}: at least {step + 1}")
    if new.async_.max_staleness and new.rollout != recipe.rollout:
        problems.extend(
            f"{key}={settings_of(new)[key]:g}: with async.max_staleness={new.async_.max_staleness} samples of later "
            "steps are generated already: leave it as it is"
            for key in settings
            if key.startswith("rollout.") and settings_of(new)[key] != known[key]
        )
    old_budget, new_budget = (r.train.max_tokens_per_micro_batch for r in (recipe, new))
    if [old_budget, new_budget].count(None) == 1:  # pipeline stages are built for fixed or for variable shapes
        problems.append(
            f"train.max_tokens_per_micro_batch={new_budget}: it was {old_budget}, and can only change from one number "
            "to another"
        )
    elif old_budget and new_budget and new_budget < old_budget and not new.algorithm.generates:
        problems.append(
            f"train.max_tokens_per_micro_batch={new_budget}: the data's rows may have as many tokens as now, "
            f"{old_budget}: at least as many"
        )
    if problems:
        raise RecipeError(recipe.name, problems)
    check_model(new)
    return new


def check_schedule(recipe: Recipe) -> None:
    """Check that each step of the schedule may change its settings; raises `RecipeError` with all problems."""
    problems, current = [], recipe
    for step, settings in recipe.schedule.items():
        if step >= current.run.steps:
            problems.append(f"schedule.{step}: the run ends before, at run.steps={current.run.steps}: leave it out")
            continue
        try:
            current = apply_settings(current, settings, step)
        except RecipeError as error:
            problems += [f"schedule.{step}: {problem}" for problem in error.problems]
    if problems:
        raise RecipeError(recipe.name, problems)


class LiveSettings:
    """The settings of a run, which may change between steps. All ranks of the group call every method together.

    The group's first rank decides what changes and broadcasts it. From `control.yaml` it takes only what has changed
    since the last read: nothing is applied twice, and a schedule may change a setting that the file set earlier.
    """

    def __init__(self, recipe: Recipe, record: RunLogger, pinned: Settings, group: dist.ProcessGroup):
        """Start with the recipe and the pinned settings, which neither the schedule nor the file can change."""
        self.initial_recipe, self._record, self._pinned, self._group = recipe, record, pinned, group
        self._path = record.folder.control
        self._settings: dict[str, Any] = {}  # all settings changed so far
        self._file_hash, self._file_settings = "", dict[str, Any]()  # of the file when it was last read
        self.recipe = override_settings(recipe, pinned)  # with the current settings

    @property
    def control(self) -> dict[str, Any]:
        """The state that a checkpoint saves, as JSON."""
        return {"settings": self._settings, "seen": self._file_hash, "file": self._file_settings}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore the settings from what a checkpoint saved; if it is empty, the run starts at its first step."""
        if saved:
            self._file_hash, self._file_settings = saved["seen"], saved["file"]
            self._apply(saved["settings"])

    def settings_for_step(self, step: int) -> Recipe:
        """Return the recipe for a step that is about to begin."""
        changes = self._collect_changes(step) if self._group.rank() == 0 else {}
        self._apply(broadcast_object(changes or None, self._group) or {})
        return self.recipe

    def _apply(self, settings: Settings) -> None:
        if settings:
            self._settings |= settings
            self.recipe = override_settings(self.initial_recipe, {**self._settings, **self._pinned})

    def _collect_changes(self, step: int) -> dict[str, Any]:
        """Return the changes of the schedule and then of the file; each is applied completely or refused."""
        changes: dict[str, Any] = {}
        current = self.recipe
        sources: dict[str, Callable[[], Settings]] = {
            "schedule": lambda: self.initial_recipe.schedule.get(step, {}),
            self._path.name: self._read_file_changes,
        }
        for source, read_settings in sources.items():
            accepted = self._file_settings
            try:
                new = self._apply_unpinned(current, read_settings(), step, source)
            except UserMistake as error:
                self._file_settings = accepted
                self._refuse(step, source, getattr(error, "problems", (str(error),)), "nothing changes")
                continue
            old = settings_of(current)
            for key, value in settings_of(new).items():
                if value != old[key]:
                    changes[key] = value
                    message = f"step {step}: {key} changes from {old[key]} to {value} ({source})"
                    fields = {"key": key, "old": old[key], "new": value, "by": source}
                    self._record.event("setting_changed", message, step=step, **fields)
            current = new
        return changes

    def _apply_unpinned(self, current: Recipe, requested: Settings, step: int, source: str) -> Recipe:
        """Apply the requested settings that are not pinned, and report the pinned ones; raises as `apply_settings`."""
        pinned = requested.keys() & self._pinned.keys()
        unpinned = {key: value for key, value in requested.items() if key not in pinned}
        if pinned:  # they are not applied, but must be valid
            apply_settings(current, requested, step)
        new = apply_settings(current, unpinned, step) if unpinned else current
        if pinned:
            why = "since the run ran out of memory"
            refused = [f"{key}: pinned to {self._pinned[key]} {why}" for key in requested if key in pinned]
            self._refuse(step, source, refused, "these settings stay")
        return new

    def _refuse(self, step: int, source: str, problems: Sequence[str], effect: str) -> None:
        why = "; ".join(problems)
        message = f"step {step}: {source} is refused, {effect}: {why}"
        self._record.event("control_refused", message, step=step, by=source, why=why)

    def _read_when_stable(self) -> bytes:
        """Read the file once nobody is writing it: a number that is cut off would still be a valid number."""
        content = read_bytes(self._path, "a text file", MAX_TEXT_BYTES)
        for _ in range(STABLE_TRIES if hashlib.sha256(content).hexdigest() != self._file_hash else 0):
            time.sleep(STABLE_SECONDS)
            before, content = content, read_bytes(self._path, "a text file", MAX_TEXT_BYTES)
            if content == before:
                break
        return content

    def _read_file_changes(self) -> Settings:
        """Return the settings in the file that are new or different since the last read.

        Raises:
            RecipeError: the file cannot be read; reported once, and ignored until the file changes again.
        """
        if not os.path.lexists(self._path):
            return {}
        read_error = None
        try:
            content = self._read_when_stable()
        except UnreadableFile as error:  # hashed like content, so that it is reported once
            content, read_error = error.why.encode(), error
        file_hash = hashlib.sha256(content).hexdigest()
        if file_hash == self._file_hash:
            return {}
        self._file_hash = file_hash
        if read_error is not None:
            raise RecipeError(str(self._path), [read_error.why]) from read_error
        try:
            raw = parse_yaml(content.decode())
            settings = flatten_settings({} if raw is None else raw)
        except ValueError as error:
            raise RecipeError(str(self._path), [str(error)]) from error
        previous, self._file_settings = self._file_settings, settings
        return {key: value for key, value in settings.items() if key not in previous or previous[key] != value}
