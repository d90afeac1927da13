"""Reads settings of earlier versions, so that their recipes and run folders can be used."""

from __future__ import annotations

from typing import Any

from hybrid3d.config.messages import format_value

MOVED = {"rollout.placement": "debug.placement", "reward.shuffle": "debug.shuffle_rewards"}
GONE: dict[str, tuple[object, str]] = {
    "sync.share_storage": (False, "no tensor of vLLM uses Megatron's memory"),
    "sync.keep_loader_layout": (False, "tensors that vLLM packs for its kernels are sent in full"),
    "sync.anchor_every": (None, "all elements are sent only where changes are not known"),
}
"""Settings that there are no more, each with the value that means what is always done now, and that in words."""


def with_present_settings(raw: dict[Any, Any], problems: list[str]) -> dict[Any, Any]:
    """Return a recipe's sections with the settings of today instead of those of earlier versions.

    Args:
        problems: messages, to which those of settings are appended that have no equal today.
    """
    raw = {key: dict(value) if isinstance(value, dict) else value for key, value in raw.items()}
    for former, present in MOVED.items():
        section, key = former.split(".")
        if key in _section(raw, section):
            to, name = present.split(".")
            if raw.get(to) is None:
                raw[to] = {}
            if isinstance(raw[to], dict) and name not in raw[to]:
                raw[to][name] = raw[section].pop(key)
    for former, (value, always) in GONE.items():
        section, key = former.split(".")
        if key in _section(raw, section):
            found = raw[section].pop(key)
            if found != value:
                problems.append(f"{former}: got {format_value(found)}, but there is no such setting any more: {always}")
    _merge_gradient(raw)
    _merge_cache(raw)
    return raw


def _merge_gradient(raw: dict[Any, Any]) -> None:
    """Replace `straight_through` of a KL estimator by its name with `+`; that of `k2` is its own gradient."""
    algorithm = _section(raw, "algorithm")
    kl = algorithm.get("kl")
    if isinstance(kl, dict) and isinstance(kl.get("straight_through"), bool):
        kl = algorithm["kl"] = dict(kl)
        if kl.pop("straight_through") and kl.get("estimator") != "k2":
            kl["estimator"] = f"{kl.get('estimator') or 'k3'}+"


def _merge_cache(raw: dict[Any, Any]) -> None:
    """Replace `keep_cache` of answers that go on over a sync by a value of `partial`."""
    ahead = _section(raw, "async")
    if isinstance(ahead.get("keep_cache"), bool) and ahead.pop("keep_cache"):
        ahead["partial"] = "continue_with_cache"


def _section(raw: dict[Any, Any], name: str) -> dict[Any, Any]:
    """Return a section, or one without keys if it is none."""
    section = raw.get(name)
    return section if isinstance(section, dict) else {}
