"""Settings that a recipe gives and nothing reads: they are refused, so that nobody believes in their effect.

A setting at its default is never refused: a resolved recipe has all of them. Neither is one that a step of the
recipe's schedule puts to use.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybrid3d.config.recipe import Recipe

# What is computed where it is asked for, without processes that could fail: see `REWARDS` and `ENVIRONMENTS` of rl/
IN_PROCESS = {"gsm8k", "calculator"}

BY_TOKEN = ("ppo", "reinforce_pp")


@dataclass(frozen=True)
class UnusedSetting:
    """Settings that are not read where a condition holds.

    Attributes:
        keys: of one section.
        where: the condition.
        why: it in words, and what would put the settings to use.
        switches: settings that decide on the condition.
    """

    section: str
    keys: tuple[str, ...]
    where: Callable[[Recipe], bool]
    why: Callable[[Recipe], str]
    switches: tuple[str, ...] = ()


def _words(text: str) -> Callable[[Recipe], str]:
    """The words of a condition; `{name}` is the algorithm's name."""
    return lambda recipe: text.format(name=recipe.algorithm.name, kind=recipe.algorithm.correction.kind)


def _is_sft(recipe: Recipe) -> bool:
    return not recipe.algorithm.generates


def _never_generates(recipe: Recipe) -> bool:
    return _is_sft(recipe) and recipe.rollout is None


def _is_builtin(recipe: Recipe) -> bool:
    environment = recipe.rollout.environment if recipe.rollout is not None else None
    return recipe.reward.name in IN_PROCESS and (environment is None or environment in IN_PROCESS)


_RL = (
    *("samples_per_prompt", "epochs", "minibatches", "clip", "clip_high", "dual_clip", "loss_agg_mode", "entropy_coef"),
    *("gamma", "lam", "dynamic_sampling"),
)

UNUSED = (
    UnusedSetting("algorithm", _RL, _is_sft, _words("algorithm.name={name} learns the answers of the data")),
    UnusedSetting("algorithm.kl", ("where",), _is_sft, _words("algorithm.name={name} measures no KL")),
    UnusedSetting(
        "algorithm.correction", ("kind",), _is_sft, _words("algorithm.name={name} has no rollout to correct for")
    ),
    UnusedSetting("run", ("eval_every",), _is_sft, _words("algorithm.name={name} evaluates nothing while it trains")),
    UnusedSetting(
        "reward",
        ("name", "model", "shuffle", "workers", "timeout_seconds", "default", "max_failures", "overlong_buffer"),
        _never_generates,
        _words("algorithm.name={name} without `rollout` has no answers that could be scored"),
    ),
    UnusedSetting(
        "sync",
        ("bucket_mib", "verify", "overlap", "share_storage"),
        _never_generates,
        _words("algorithm.name={name} without `rollout` never syncs"),
    ),
    UnusedSetting(
        "algorithm",
        ("gamma",),
        lambda recipe: recipe.algorithm.generates and recipe.algorithm.name not in BY_TOKEN,
        _words("algorithm.name={name} discounts nothing, as ppo and reinforce_pp do"),
    ),
    UnusedSetting(
        "algorithm",
        ("lam",),
        lambda recipe: recipe.algorithm.generates and not recipe.algorithm.critic,
        _words("algorithm.name={name} estimates no values, as ppo does"),
    ),
    UnusedSetting(
        "algorithm.kl",
        ("estimator", "target", "horizon"),
        lambda recipe: recipe.algorithm.kl.where == "none",
        _words("algorithm.kl.where=none measures no KL"),
    ),
    UnusedSetting(
        "algorithm.kl",
        ("horizon",),
        lambda recipe: recipe.algorithm.kl.where != "none" and recipe.algorithm.kl.target is None,
        _words("without algorithm.kl.target the coefficient is fixed"),
        ("algorithm.kl.target",),
    ),
    UnusedSetting(
        "algorithm.correction",
        ("low", "high"),
        lambda recipe: recipe.algorithm.correction.kind == "none",
        _words("algorithm.correction.kind=none corrects nothing"),
        ("algorithm.correction.kind",),
    ),
    UnusedSetting(
        "algorithm.correction",
        ("low",),
        lambda recipe: recipe.algorithm.correction.kind in ("truncate", "sequence_truncate"),
        _words("algorithm.correction.kind={kind} bounds ratios above only, by high"),
        ("algorithm.correction.kind",),
    ),
    UnusedSetting(
        "optimizer",
        ("min_lr",),
        lambda recipe: recipe.optimizer.schedule == "constant",
        _words("with optimizer.schedule=constant the rate never falls: set linear or cosine"),
    ),
    UnusedSetting(
        "critic.optimizer",
        ("min_lr",),
        lambda recipe: recipe.critic.optimizer is not None and recipe.critic.optimizer.schedule == "constant",
        _words("with critic.optimizer.schedule=constant the rate never falls: set linear or cosine"),
    ),
    UnusedSetting(
        "rollout",
        ("max_turns",),
        lambda recipe: recipe.rollout is not None and recipe.rollout.environment is None,
        _words("without rollout.environment an answer has one turn"),
    ),
    UnusedSetting(
        "reward",
        ("workers", "timeout_seconds"),
        lambda recipe: not _never_generates(recipe) and _is_builtin(recipe),
        lambda recipe: f"reward.name={recipe.reward.name} is computed without processes of its own",
    ),
    UnusedSetting(
        "reward",
        ("default", "max_failures"),
        lambda recipe: (
            recipe.rollout is not None and recipe.reward.name in IN_PROCESS and recipe.rollout.environment is None
        ),
        lambda recipe: f"reward.name={recipe.reward.name} never fails",
    ),
)


def unused_settings(recipe: Recipe) -> Iterator[str]:
    """A problem for each setting that is not the default and that nothing reads."""
    scheduled = {key for settings in recipe.schedule.values() for key in settings}
    for unused in UNUSED:
        if scheduled.intersection(unused.switches) or not unused.where(recipe):
            continue
        section: Any = recipe
        for name in unused.section.split("."):
            section = getattr(section, name)
        defaults = {field.name: field.default for field in dataclasses.fields(section)}
        if unused.section == "algorithm.kl":
            defaults |= {"where": "none"}
        for key in unused.keys:
            value = getattr(section, key)
            if value != defaults[key]:
                said = f"{unused.section}.{key}={_as_yaml(value)} has no effect: {unused.why(recipe)}"
                yield f"{said}: leave it out, or set it to {_as_yaml(defaults[key])}"


def _as_yaml(value: object) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
