"""Settings that change during a run: at a step of the recipe's `schedule`, or by the folder's `control.yaml`."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from hybrid3d.config import Recipe, RecipeError, read_recipe
from hybrid3d.config.schema import dotted, parse, with_settings
from hybrid3d.distributed import broadcast_object
from hybrid3d.errors import UserMistake
from hybrid3d.inputs.checks import check_model
from hybrid3d.storage.user_files import MAX_TEXT_BYTES, UnreadableFile, read_bytes

if TYPE_CHECKING:
    from hybrid3d.run.record import Record

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
    "sync.verify",
    "rollout.temperature",
    "train.micro_batch_size",
    "train.max_tokens_per_micro_batch",
    "guard.*",
)

SETTLING_SECONDS = 0.5  # in which an edited file must stay as it is to be believed
SETTLING_TRIES = 20

Settings = Mapping[str, Any]
"""Values by the dotted keys of a recipe."""


def settings_of(recipe: Recipe) -> dict[str, Any]:
    """All settings of a recipe; a section that it has not is None."""
    return dotted(dataclasses.asdict(recipe))


def overlaid(recipe: Recipe, settings: Settings) -> Recipe:
    """The recipe with these settings in place of its own. RecipeError: with all that is wrong with them."""
    problems: list[str] = []
    raw = with_settings(dataclasses.asdict(recipe), settings, problems)
    return read_recipe(raw, recipe.name, problems)


def changed(recipe: Recipe, settings: Settings, step: int) -> Recipe:
    """The recipe from `step` on, where these settings change.

    Raises:
        RecipeError: one may not change while a run goes on, or is wrong in a recipe too.
    """
    problems, known = [], settings_of(recipe)
    for key in settings:
        section = key.rpartition(".")[0]
        if not any(fnmatchcase(key, pattern) for pattern in MUTABLE_SETTINGS):
            problems.append(f"{key}: cannot change during a run; what can: {', '.join(MUTABLE_SETTINGS)}")
        elif section in known:
            problems.append(f"{key}: the recipe has no section {section}, and a run cannot begin one")
    if problems:
        raise RecipeError(recipe.name, problems)
    new = overlaid(recipe, settings)
    if "run.steps" in settings and new.run.steps <= step:
        problems.append(f"run.steps={new.run.steps}: step {step} comes next: at least {step + 1}")
    budgets = [one.train.max_tokens_per_micro_batch for one in (recipe, new)]
    if budgets.count(None) == 1:  # stages are built for micro batches of one shape, or of many
        was, wanted = budgets
        problems.append(f"train.max_tokens_per_micro_batch={wanted}: it was {was}: only a number can become another")
    if problems:
        raise RecipeError(recipe.name, problems)
    check_model(new)
    return new


def check_schedule(recipe: Recipe) -> None:
    """Whether each step of the schedule may change what it changes.

    Raises:
        RecipeError: with all that is wrong.
    """
    problems, now = [], recipe
    for step, settings in recipe.schedule.items():
        if step >= now.run.steps:
            problems.append(f"schedule.{step}: run.steps={now.run.steps} ends the run before: leave it out")
            continue
        try:
            now = changed(now, settings, step)
        except RecipeError as error:
            problems += [f"schedule.{step}: {problem}" for problem in error.problems]
    if problems:
        raise RecipeError(recipe.name, problems)


class LiveSettings:
    """The settings of a run, which may change between steps. Every rank of the group calls every method together.

    The group's first rank decides what changes and broadcasts it. From `control.yaml` it takes what has changed since
    the file was read last: nothing is applied twice, and a schedule may change a setting that the file set earlier.

    Attributes:
        recipe: the recipe with the settings in force.
    """

    def __init__(self, recipe: Recipe, record: Record, held: Settings, group: dist.ProcessGroup):
        """
        Args:
            held: settings that neither a schedule nor the file can change.
        """
        self._first, self._record, self._held = recipe, record, held
        self._group = group
        self._path = record.folder.control
        self._settings: dict[str, Any] = {}
        self._seen, self._file = "", dict[str, Any]()
        self.recipe = overlaid(recipe, held)

    @property
    def progress(self) -> dict[str, Any]:
        """What a resumed run must know, as JSON."""
        return {"control": {"settings": self._settings, "seen": self._seen, "file": self._file}}

    def restore(self, progress: Mapping[str, Any]) -> None:
        """Go on with the settings that were in force; from the first step on, if there is no progress yet."""
        if progress:
            saved = progress["control"]
            self._seen, self._file = saved["seen"], saved["file"]
            self._apply(saved["settings"])

    def settings_for_step(self, step: int) -> Recipe:
        """Return the recipe for a step that is about to begin."""
        due = self._due(step) if self._group.rank() == 0 else {}
        self._apply(broadcast_object(due or None, self._group) or {})
        return self.recipe

    def _apply(self, settings: Settings) -> None:
        if settings:
            self._settings |= settings
            self.recipe = overlaid(self._first, {**self._settings, **self._held})

    def _due(self, step: int) -> dict[str, Any]:
        """What changes at a step: by the schedule and then by the file, each as a whole or not at all."""
        due: dict[str, Any] = {}
        now = self.recipe
        sources: dict[str, Callable[[], Settings]] = {
            "schedule": lambda: self._first.schedule.get(step, {}),
            self._path.name: self._edited,
        }
        for by, asked in sources.items():
            accepted = self._file
            try:
                new = self._changed(now, asked(), step, by)
            except UserMistake as error:
                self._file = accepted
                self._refuse(step, by, getattr(error, "problems", (str(error),)), "nothing changes")
                continue
            before = settings_of(now)
            for key, value in settings_of(new).items():
                if value != before[key]:
                    due[key] = value
                    said = f"step {step}: {key} is {value}, it was {before[key]} ({by})"
                    self._record.event("setting_changed", said, step=step, key=key, old=before[key], new=value, by=by)
            now = new
        return due

    def _changed(self, now: Recipe, asked: Settings, step: int, by: str) -> Recipe:
        """`changed`, but for what is held. RecipeError: as there."""
        free = {key: value for key, value in asked.items() if key not in self._held}
        if len(free) < len(asked):  # what is held is not applied, and yet must be what a recipe may say
            changed(now, asked, step)
        new = changed(now, free, step) if free else now
        held = [f"{key}: held at {self._held[key]} since memory ran out" for key in asked if key in self._held]
        if held:
            self._refuse(step, by, held, "it stays")
        return new

    def _refuse(self, step: int, by: str, problems: Sequence[str], then: str) -> None:
        why = "; ".join(problems)
        self._record.event("control_refused", f"step {step}: {by} is refused, {then}: {why}", step=step, by=by, why=why)

    def _settled(self) -> bytes:
        """What the file says when it is not being written: half of a number is a number too."""
        content = self._read()
        for _ in range(SETTLING_TRIES if hashlib.sha256(content).hexdigest() != self._seen else 0):
            time.sleep(SETTLING_SECONDS)
            before, content = content, self._read()
            if content == before:
                break
        return content

    def _read(self) -> bytes:
        return read_bytes(self._path, "a text file", MAX_TEXT_BYTES)

    def _edited(self) -> Settings:
        """What the file says and did not say before.

        Raises:
            RecipeError: it cannot be read. Until it is edited again it says nothing.
        """
        unread = None
        if not os.path.lexists(self._path):
            return {}
        try:
            content = self._settled()
        except UnreadableFile as error:  # said once, as what is wrong in the file is
            content, unread = error.why.encode(), error
        seen = hashlib.sha256(content).hexdigest()
        if seen == self._seen:
            return {}
        self._seen = seen
        if unread is not None:
            raise RecipeError(str(self._path), [unread.why]) from unread
        try:
            said = parse(content.decode())
            settings = dotted({} if said is None else said)
        except ValueError as error:
            raise RecipeError(str(self._path), [str(error)]) from error
        before, self._file = self._file, settings
        return {key: value for key, value in settings.items() if key not in before or before[key] != value}
