"""Reads settings of earlier versions, so that their recipes and run folders can be used."""

from __future__ import annotations

import copy
from typing import Any

from hybrid3d.config.messages import format_value

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
