"""Reads a `Recipe` from YAML and overrides, and reports all problems in one error.

Settings of earlier versions are read too, so that their recipes and run folders can be used.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from hybrid3d.config.recipe import Recipe
from hybrid3d.config.rules import validate_recipe
from hybrid3d.config.schema import RecipeError, format_value, read_section, read_yaml, to_raw
from hybrid3d.storage.user_files import parse_yaml

MOVED = {"rollout.placement": "debug.placement", "reward.shuffle": "debug.shuffle_rewards"}
"""Settings that are elsewhere today."""

MERGED: dict[str, tuple[str, dict[str | None, str]]] = {
    "algorithm.kl.straight_through": ("estimator", {None: "k3+", "k1": "k1+", "k2": "k2", "k3": "k3+", "abs": "abs+"}),
    "async.keep_cache": ("partial", {"continue": "continue_with_cache"}),
}
"""Settings that were on or off: if on, another key of the section has another value today, by what it had beside it."""

GONE: dict[str, tuple[object, str]] = {
    "sync.share_storage": (False, "no tensor of vLLM uses Megatron's memory"),
    "sync.keep_loader_layout": (False, "tensors that vLLM packs for its kernels are sent in full"),
    "sync.anchor_every": (None, "all elements are sent only where changes are not known"),
}
"""Settings that no longer exist, each with the value that means what is always done now, and that in words."""


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read and validate a recipe.

    Args:
        overrides: settings as `section.key=value`, the value in YAML.

    Raises:
        RecipeError: with all problems.
    """
    return _overridden(read_yaml(Path(path)), overrides, str(path))


def with_overrides(recipe: Recipe, overrides: Sequence[str]) -> Recipe:
    """Return a recipe with these settings, given as for `load_recipe`, replaced.

    Raises:
        RecipeError: with all problems.
    """
    return _overridden(to_raw(recipe), overrides, recipe.name)


def _overridden(raw: dict[Any, Any], overrides: Sequence[str], subject: str) -> Recipe:
    problems: list[str] = []
    apply_overrides(raw, overrides, problems)
    return read_recipe(raw, subject, problems)


def read_recipe(raw: object, subject: str, problems: list[str]) -> Recipe:
    """Return the validated recipe of parsed YAML.

    Args:
        subject: what the error message is about, such as the file's path.
        problems: problems found so far, which the error includes.

    Raises:
        RecipeError: with all problems.
    """
    present = with_present_settings(raw, problems) if isinstance(raw, dict) else raw
    recipe = read_section(Recipe, present, "", problems)
    if recipe is not None:
        problems.extend(refusal.message for refusal in validate_recipe(recipe))
    if recipe is None or problems:
        raise RecipeError(subject, problems)
    return recipe


def load_derived(path: str | Path) -> Recipe:
    """Read a recipe that this program has derived from a valid one, whose settings may contradict each other.

    Raises:
        RecipeError: with all values that no recipe has.
    """
    problems: list[str] = []
    recipe = read_section(Recipe, read_yaml(Path(path)), "", problems)
    if recipe is None:
        raise RecipeError(str(path), problems)
    return recipe


def recipe_to_yaml(recipe: Recipe) -> str:
    """Return the recipe as YAML with all defaults written out; `load_recipe` reads an equal recipe from it."""
    return str(yaml.safe_dump(to_raw(recipe), sort_keys=False, allow_unicode=True))


def recipe_to_ascii(recipe: Recipe) -> str:
    """Return the recipe as YAML for a variable, which a locale may not let have other characters."""
    return str(yaml.safe_dump(to_raw(recipe), sort_keys=False))


def recipe_from_yaml(text: str, subject: str) -> Recipe:
    """Return the recipe of which `recipe_to_ascii` has made this text; `RecipeError` with the subject if it is none."""
    return read_recipe(parse_yaml(text), subject, [])


def with_settings(raw: Mapping[Any, Any], settings: Mapping[str, object], problems: list[str]) -> dict[Any, Any]:
    """Return a copy of a recipe's sections with each `section.key` set to a new value; append to `problems`."""
    changed = copy.deepcopy(dict(raw))
    for key, value in settings.items():
        try:
            _set(changed, key.split("."), value)
        except ValueError as error:
            problems.append(f"{key}: {error}")
    return changed


def apply_overrides(raw: dict[Any, Any], overrides: Iterable[str], problems: list[str]) -> None:
    """Set each `section.key=value` in `raw`; values are YAML. Unknown keys are reported when `raw` is read."""
    for override in overrides:
        path, equals, value = override.partition("=")
        keys = path.strip().split(".")
        try:
            if not equals or not all(keys):
                raise ValueError("expected section.key=value")
            _set(raw, keys, parse_yaml(value))
        except ValueError as error:
            text = override if len(override) <= 200 else f"{override[:200]}..."
            problems.append(f"override {text!r}: {error}")


def _set(raw: dict[Any, Any], keys: Sequence[str], value: object) -> None:
    section = raw
    for depth, name in enumerate(keys[:-1]):
        name = _present(section, name)
        if section.get(name) is None:  # absent, or `rollout: null`
            section[name] = {}
        if not isinstance(section[name], dict):
            raise ValueError(f"{name} is not a section but {format_value(section[name])}")
        section = section[name]
        if keys[0] == "schedule" and depth == 1:  # of a step, which may have the same setting with dots
            section.pop(".".join(keys[2:]), None)
    section[_present(section, keys[-1])] = value


def _present(section: dict[Any, Any], name: str) -> Any:
    """Return the key that a section has for a name: those of a schedule's steps are numbers."""
    return next((present for present in section if str(present) == name), name)


def with_present_settings(raw: dict[Any, Any], problems: list[str]) -> dict[Any, Any]:
    """Return a recipe's sections with the settings of today instead of those of earlier versions.

    A former setting that is off is left out, because earlier versions wrote all settings into run folders.

    Args:
        problems: messages, to which one is appended for each setting that has no equal today.
    """
    raw = copy.deepcopy(raw)
    today = dict(MOVED)
    for former, present in MOVED.items():
        _move(raw, former, present)
    for former, (present, values) in MERGED.items():
        section, key = _place(raw, former)
        _merge(section, key, present, values)
        today[former] = f"{former.removesuffix(key)}{present}={' or '.join(dict.fromkeys(values.values()))}"
    for former, present in today.items():
        section, key = _place(raw, former)
        if key in section:
            value = format_value(section.pop(key))
            problems.append(f"{former}: got {value}, but this is {present} today, and does not go with what is given")
    for former, (always, meaning) in GONE.items():
        section, key = _place(raw, former)
        if key in section and (value := section.pop(key)) != always:
            problems.append(
                f"{former}: got {format_value(value)}, but there is no such setting any more: {meaning}: leave it out"
            )
    return raw


def _move(raw: dict[Any, Any], former: str, present: str) -> None:
    """Move a setting to its place of today, unless another value is there."""
    section, key = _place(raw, former)
    name = present.split(".")[0]
    if key in section:
        if raw.get(name) is None:
            raw[name] = {}
        to, today = _place(raw, present)
        if isinstance(raw[name], dict) and to.get(today, section[key]) == section[key]:
            to[today] = section.pop(key)


def _merge(section: dict[Any, Any], former: str, present: str, merged: dict[str | None, str]) -> None:
    """Let a setting say what it said together with a former one, which was on or off; leave both if it cannot."""
    value, on = section.get(present), section.get(former)
    if on is False or (on is True and value in merged.values()):
        del section[former]
    elif on is True and (value is None or isinstance(value, str)) and value in merged:
        section[present] = merged[value]
        del section[former]


def _place(raw: dict[Any, Any], setting: str) -> tuple[dict[Any, Any], str]:
    """Return the section of a setting, or one without keys if there is none, and its key."""
    *sections, key = setting.split(".")
    section = raw
    for name in sections:
        found = section.get(name)
        section = found if isinstance(found, dict) else {}
    return section, key
