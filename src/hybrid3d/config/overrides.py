"""Sets settings that are given by their dotted names in a recipe's sections."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hybrid3d.config.messages import format_value
from hybrid3d.storage.user_files import parse_yaml


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
        try:
            _apply_override(raw, override)
        except ValueError as error:
            text = override if len(override) <= 200 else f"{override[:200]}..."
            problems.append(f"override {text!r}: {error}")


def _apply_override(raw: dict[Any, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise ValueError("expected section.key=value")
    _set(raw, keys, parse_yaml(text))


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
