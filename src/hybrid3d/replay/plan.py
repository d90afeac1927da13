"""Where a replay of a recorded step begins, and with which settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hybrid3d.config import Async, Recipe, RecipeError, Reward, RoleRanks, Rollout, Sync
from hybrid3d.config.load import with_overrides
from hybrid3d.errors import UserMistake
from hybrid3d.run.folder import RunFolder, checkpoint_steps, recorded_steps

LISTED = 12  # steps that a message lists


class NotRecorded(UserMistake):
    """A step cannot be replayed, or compared, because steps are not recorded or a checkpoint is missing."""


def find_start(folder: RunFolder, step: int) -> int:
    """Return the step from which a replay begins: that of the nearest checkpoint, or 0, the model before training.

    Raises:
        NotRecorded: a step from there to the requested one is not recorded.
    """
    recorded, checkpoints = recorded_steps(folder), checkpoint_steps(folder)
    start = max((updates for updates in checkpoints if updates <= step), default=0)
    needed = range(start, step + 1) if step in recorded else [step]
    missing = next((number for number in needed if number not in recorded), None)
    if missing is None:
        return start
    problem = f"step {missing} is not recorded"
    if missing != step:
        begins = f"the checkpoint after {start} updates" if start else "the model before training"
        problem = f"a replay begins with {begins} and needs every step from {start} on, but {problem}"
    existing = f"Recorded steps: {_listed(recorded)}; checkpoints after {_listed(checkpoints)} updates"
    fix = "set run.record=always, or run.record=every-N with run.checkpoint_every=N"
    raise NotRecorded(f"{folder.path}: step {step} cannot be replayed: {problem}. {existing}: {fix}")


SAMPLING = ("max_model_len", "max_new_tokens", "temperature")
SHAPING = ("overlong_buffer", "min", "max", "whiten", "coef")  # of rewards that were computed


def training_recipe(recipe: Recipe, overrides: Sequence[str] = ()) -> Recipe:
    """Return a recipe without what training steps do not need, such as ranks that generate, in another train layout.

    Overrides are settings of `train`, as `train.tp=2`.

    Raises:
        RecipeError: an override is of another section, or the result is invalid; with all problems.
    """
    rollout, reward = recipe.rollout, recipe.reward
    model = reward.model if recipe.roles.reward.ranks is None else None  # the rewards of other ranks are recorded
    reduced = replace(
        recipe,
        rollout=rollout and Rollout(**{key: getattr(rollout, key) for key in SAMPLING}),
        roles=RoleRanks(),
        async_=Async(),
        sync=Sync(),
        reward=Reward(model=model, **{key: getattr(reward, key) for key in SHAPING}),
        guard=replace(recipe.guard, initial_mismatch="ignore"),
        tracking=(),
        schedule={},
    )
    if not overrides:
        return reduced
    others = [text for text in overrides if not text.strip().startswith("train.")]
    if others:
        raise RecipeError("replay", [f"{text}: only settings of train can differ in a replay" for text in others])
    return with_overrides(reduced, overrides)


def _listed(steps: Sequence[int]) -> str:
    shown = [str(step) for step in steps]
    return ", ".join([*shown[:LISTED], *(["...", shown[-1]] if len(shown) > LISTED else [])]) or "none"
