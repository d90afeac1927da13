"""Refuses settings that have no effect in a recipe, so that users do not rely on them.

A setting at its default is never refused, because a resolved recipe lists all settings. Neither is a setting that a
step of the recipe's schedule makes effective.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from keyword import iskeyword
from typing import TYPE_CHECKING, Any

from hybrid3d.config.algorithms import SMOOTHED_LOSSES, TOKEN_ADVANTAGES
from hybrid3d.config.refusals import Kind, Refusal

if TYPE_CHECKING:
    from hybrid3d.config.recipe import Recipe

# Rewards and environments that are computed in the rank's own process, without workers that could fail: see `REWARDS`
# and `ENVIRONMENTS` in scoring/
IN_PROCESS = {"gsm8k", "calculator"}


@dataclasses.dataclass(frozen=True)
class UnusedRule:
    """Settings of a section that have no effect under a condition.

    Attributes:
        section: dotted name of the section.
        keys: settings of that section.
        condition: returns whether the settings are unused in a recipe.
        reason: returns the condition in words.
        deciding_settings: settings that decide on the condition and that a schedule may change.
        kind: why the settings have no effect.
    """

    section: str
    keys: tuple[str, ...]
    condition: Callable[[Recipe], bool]
    reason: Callable[[Recipe], str]
    deciding_settings: tuple[str, ...] = ()
    kind: Kind = "definition"


def reason_of(text: str) -> Callable[[Recipe], str]:
    """Return a function that fills in `{name}`, the algorithm's name, and `{kind}`, the correction's kind."""
    return lambda recipe: text.format(name=recipe.algorithm.name, kind=recipe.algorithm.correction.kind)


def _trains_on_data(recipe: Recipe) -> bool:
    return not recipe.algorithm.generates


def _loss_is(*kinds: str) -> Callable[[Recipe], bool]:
    return lambda recipe: recipe.algorithm.generates and recipe.algorithm.combination.policy_loss in kinds


def _loss_is_not(*kinds: str) -> Callable[[Recipe], bool]:
    return lambda recipe: not _loss_is(*kinds)(recipe)


def _by_loss(recipe: Recipe) -> str:
    return f"algorithm.policy_loss={recipe.algorithm.combination.policy_loss} does not use it"


def _has_no_pairs(recipe: Recipe) -> bool:
    return not recipe.algorithm.uses_pairs


def _by_preference_loss(recipe: Recipe) -> str:
    return f"algorithm.preference.loss_type={recipe.algorithm.preference.loss_type} does not use it"


def _never_generates(recipe: Recipe) -> bool:
    return _trains_on_data(recipe) and recipe.rollout is None


def _is_builtin(recipe: Recipe) -> bool:
    environment = recipe.rollout.environment if recipe.rollout is not None else None
    return recipe.reward.name in IN_PROCESS and (environment is None or environment in IN_PROCESS)


_RL_SETTINGS = (
    *("samples_per_prompt", "epochs", "minibatches", "clip", "clip_high", "dual_clip", "loss_agg_mode", "entropy_coef"),
    *("gamma", "lam", "dynamic_sampling", "advantage", "advantage_scale", "policy_loss", "ratio", "mask_truncated"),
    "high_entropy_fraction",
)

DIVIDED = ("group_std", "batch_std")  # by what normalized rewards have been divided by already

UNUSED_RULES = (
    UnusedRule(
        "algorithm", _RL_SETTINGS, _trains_on_data, reason_of("algorithm.name={name} trains on the answers of the data")
    ),
    UnusedRule("algorithm.kl", ("where",), _trains_on_data, reason_of("algorithm.name={name} measures no KL")),
    UnusedRule(
        "algorithm.correction",
        ("kind", "bypass"),
        _trains_on_data,
        reason_of("algorithm.name={name} has no rollout to correct for"),
    ),
    UnusedRule("train", ("router_replay",), _trains_on_data, reason_of("algorithm.name={name} has no earlier choices")),
    UnusedRule(
        "run",
        ("eval_every",),
        lambda recipe: _trains_on_data(recipe) and not recipe.algorithm.uses_pairs,
        reason_of("algorithm.name={name} does not evaluate during training"),
        kind="not_built",
    ),
    UnusedRule(
        "data", ("chosen", "rejected"), _has_no_pairs, reason_of("algorithm.name={name} reads no preference pairs")
    ),
    UnusedRule(
        "data",
        ("answer",),
        lambda recipe: recipe.algorithm.uses_pairs and not recipe.evaluation.data,
        reason_of("algorithm.name={name} takes the chosen answer, data.chosen, as the reference answer"),
    ),
    UnusedRule(
        "data",
        ("date",),
        lambda recipe: not recipe.data.chat_template and (recipe.rollout is None or recipe.rollout.agents is None),
        reason_of("without data.chat_template no template writes a date"),
    ),
    UnusedRule(
        "algorithm.preference",
        ("loss_type", "beta", "label_smoothing", "simpo_gamma", "sft_coef"),
        _has_no_pairs,
        reason_of("algorithm.name={name} trains on no preference pairs"),
    ),
    UnusedRule(
        "algorithm.preference",
        ("label_smoothing",),
        lambda recipe: recipe.algorithm.uses_pairs and recipe.algorithm.preference.loss_type not in SMOOTHED_LOSSES,
        _by_preference_loss,
    ),
    UnusedRule(
        "algorithm.preference",
        ("simpo_gamma",),
        lambda recipe: recipe.algorithm.uses_pairs and recipe.algorithm.preference.loss_type != "simpo",
        _by_preference_loss,
    ),
    UnusedRule(
        "evaluation",
        ("samples", "temperature", "top_p", "k", "data"),
        _never_generates,
        reason_of("algorithm.name={name} without `rollout` cannot answer held-out problems"),
    ),
    UnusedRule(
        "evaluation",
        ("top_p",),
        lambda recipe: not _never_generates(recipe) and recipe.evaluation.temperature == 0,
        reason_of("with evaluation.temperature=0 held-out answers are greedy"),
        ("evaluation.temperature",),
    ),
    UnusedRule(
        "evaluation",
        ("k",),
        lambda recipe: not _never_generates(recipe) and recipe.evaluation.samples == 1,
        reason_of("with evaluation.samples=1 there is no pass@k beside the accuracy"),
        ("evaluation.samples",),
    ),
    UnusedRule(
        "rollout",
        ("top_p", "top_k", "min_p"),
        lambda recipe: _trains_on_data(recipe) and recipe.rollout is not None,
        reason_of("algorithm.name={name} does not sample answers to train on"),
    ),
    UnusedRule("run", ("record",), _trains_on_data, reason_of("algorithm.name={name} has no samples to record")),
    UnusedRule(
        "debug",
        ("shuffle_rewards",),
        lambda recipe: not recipe.algorithm.generates,
        reason_of("algorithm.name={name} has no rewards"),
    ),
    UnusedRule(
        "reward",
        ("name", "model", "workers", "timeout_seconds", "default", "max_failures", "overlong_buffer"),
        _never_generates,
        reason_of("algorithm.name={name} without `rollout` has no answers to score"),
    ),
    UnusedRule(
        "reward",
        ("min", "max", "whiten", "coef"),
        _trains_on_data,
        reason_of("algorithm.name={name} has no advantages"),
    ),
    UnusedRule(
        "reward",
        ("whiten",),
        lambda recipe: recipe.algorithm.generates and recipe.algorithm.combination.advantage_scale in DIVIDED,
        lambda recipe: (
            f"algorithm.advantage_scale={recipe.algorithm.combination.advantage_scale} divides by the deviation"
        ),
    ),
    UnusedRule(
        "sync",
        ("bucket_mib", "verify", "overlap", "delta", "shared_memory", "transport"),
        _never_generates,
        reason_of("algorithm.name={name} without `rollout` never syncs"),
    ),
    UnusedRule(
        "roles.generation",
        ("max_restarts", "active_ranks"),
        lambda recipe: not recipe.is_split,
        reason_of("without roles.generation.ranks the ranks that train also generate"),
    ),
    UnusedRule(
        "roles.reward",
        ("tp", "pp", "ep", "max_restarts"),
        lambda recipe: recipe.roles.reward.ranks is None,
        reason_of("without roles.reward.ranks no rank only computes rewards"),
    ),
    UnusedRule(
        "roles.reward",
        ("tp", "pp", "ep"),
        lambda recipe: recipe.roles.reward.ranks is not None and recipe.reward.model is None,
        reason_of("without reward.model there is no model to distribute"),
    ),
    UnusedRule(
        "rollout",
        ("sleep",),
        lambda recipe: recipe.is_split and recipe.rollout is not None,
        reason_of("with roles.generation.ranks no rank has both engines"),
    ),
    UnusedRule(
        "debug",
        ("placement",),
        lambda recipe: recipe.is_split or recipe.rollout is None,
        reason_of("no rank has both engines"),
    ),
    UnusedRule(
        "async", ("max_staleness", "partial"), _trains_on_data, reason_of("algorithm.name={name} does not generate")
    ),
    UnusedRule(
        "async",
        ("keep_cache",),
        lambda recipe: recipe.async_.partial != "continue",
        reason_of("without async.partial=continue no answer goes on over a sync"),
    ),
    UnusedRule(
        "async",
        ("batches_in_flight", "late_answers"),
        lambda recipe: recipe.async_.partial is None,
        reason_of("without async.partial a step waits for all of its answers"),
    ),
    UnusedRule(
        "sync",
        ("overlap",),
        lambda recipe: recipe.is_split and recipe.async_.max_staleness > 0,
        reason_of("with async.max_staleness samples are generated during the update"),
    ),
    UnusedRule(
        "rollout",
        ("keep_weights",),
        lambda recipe: recipe.rollout is not None and not recipe.rollout.sleep,
        reason_of("vLLM keeps its weights as rollout.sleep is false"),
    ),
    UnusedRule(
        "algorithm",
        ("gamma",),
        lambda recipe: recipe.algorithm.generates and recipe.algorithm.combination.advantage not in TOKEN_ADVANTAGES,
        reason_of("algorithm.name={name} does not discount, only algorithm.advantage=returns and gae do"),
    ),
    UnusedRule(
        "algorithm",
        ("lam",),
        lambda recipe: recipe.algorithm.generates and not recipe.algorithm.uses_critic,
        reason_of("algorithm.name={name} estimates no values, only algorithm.advantage=gae does"),
    ),
    UnusedRule("algorithm", ("clip", "clip_high"), _loss_is("sapo", "reinforce", "kl_cov"), _by_loss),
    UnusedRule(
        "algorithm",
        ("dual_clip",),
        lambda recipe: recipe.algorithm.generates and not _loss_is("ppo", "clip_cov")(recipe),
        _by_loss,
    ),
    UnusedRule("algorithm.loss", ("tau_positive", "tau_negative"), _loss_is_not("sapo"), _by_loss),
    UnusedRule("algorithm.loss", ("cov_fraction",), _loss_is_not("clip_cov", "kl_cov"), _by_loss),
    UnusedRule("algorithm.loss", ("cov_low", "cov_high"), _loss_is_not("clip_cov"), _by_loss),
    UnusedRule("algorithm.loss", ("cov_kl_coef",), _loss_is_not("kl_cov"), _by_loss),
    UnusedRule("algorithm.loss", ("max_ratio",), _loss_is_not("dppo_tv", "dppo_kl"), _by_loss),
    UnusedRule(
        "algorithm.kl",
        ("estimator", "target", "horizon", "clamp", "straight_through", "ratio_weighted"),
        lambda recipe: recipe.algorithm.kl.where == "none",
        reason_of("algorithm.kl.where=none measures no KL"),
    ),
    UnusedRule(
        "algorithm.kl",
        ("reference", "endpoint"),
        lambda recipe: not recipe.algorithm.uses_reference,
        lambda recipe: (
            f"algorithm.preference.loss_type={recipe.algorithm.preference.loss_type} has no reference"
            if recipe.algorithm.uses_pairs
            else "algorithm.kl.where=none measures no KL"
        ),
    ),
    UnusedRule(
        "algorithm.kl",
        ("straight_through", "ratio_weighted"),
        lambda recipe: recipe.algorithm.kl.where == "reward",
        reason_of("with algorithm.kl.where=reward the KL has no gradient"),
    ),
    UnusedRule(
        "algorithm.kl",
        ("horizon",),
        lambda recipe: recipe.algorithm.kl.where != "none" and recipe.algorithm.kl.target is None,
        reason_of("without algorithm.kl.target the coefficient is fixed"),
        ("algorithm.kl.target",),
    ),
    UnusedRule(
        "algorithm.correction",
        ("low", "high", "normalize"),
        lambda recipe: recipe.algorithm.correction.kind == "none",
        reason_of("algorithm.correction.kind=none corrects nothing"),
        ("algorithm.correction.kind",),
    ),
    UnusedRule(
        "algorithm.correction",
        ("low",),
        lambda recipe: recipe.algorithm.correction.kind in ("truncate", "sequence_truncate"),
        reason_of("algorithm.correction.kind={kind} bounds ratios only from above, by high"),
        ("algorithm.correction.kind",),
    ),
    UnusedRule(
        "optimizer",
        ("min_lr",),
        lambda recipe: recipe.optimizer.schedule == "constant",
        reason_of("with optimizer.schedule=constant the rate never decays: set linear or cosine"),
    ),
    UnusedRule(
        "critic.optimizer",
        ("min_lr",),
        lambda recipe: recipe.critic.optimizer is not None and recipe.critic.optimizer.schedule == "constant",
        reason_of("with critic.optimizer.schedule=constant the rate never decays: set linear or cosine"),
    ),
    UnusedRule(
        "rollout",
        ("max_turns",),
        lambda recipe: recipe.rollout is not None and recipe.rollout.environment is None,
        reason_of("without rollout.environment an answer has one turn"),
    ),
    UnusedRule(
        "reward",
        ("workers", "timeout_seconds"),
        lambda recipe: not _never_generates(recipe) and _is_builtin(recipe),
        lambda recipe: f"reward.name={recipe.reward.name} is computed without worker processes",
    ),
    UnusedRule(
        "reward",
        ("default", "max_failures"),
        lambda recipe: (
            recipe.rollout is not None
            and recipe.reward.name in IN_PROCESS
            and recipe.rollout.environment is None
            and recipe.rollout.agents is None
        ),
        lambda recipe: f"reward.name={recipe.reward.name} never fails",
    ),
)


def unused_settings(recipe: Recipe) -> Iterator[Refusal]:
    """Yield a record of each setting that is not at its default and has no effect."""
    scheduled = {key for settings in recipe.schedule.values() for key in settings}
    for rule in UNUSED_RULES:
        if scheduled.intersection(rule.deciding_settings) or not rule.condition(recipe):
            continue
        section: Any = recipe
        for name in rule.section.split("."):
            section = getattr(section, f"{name}_" if iskeyword(name) else name)
        defaults = {field.name: _default(field) for field in dataclasses.fields(section)}
        if rule.section == "algorithm.kl":
            defaults |= {"where": "none"}
        for key in rule.keys:
            value = getattr(section, key)
            if value != defaults[key]:
                problem = f"{rule.section}.{key}={_as_yaml(value)} has no effect: {rule.reason(recipe)}"
                message = f"{problem}: leave it out, or set it to {_as_yaml(defaults[key])}"
                yield Refusal((f"{rule.section}.{key}",), rule.kind, message)


def _default(field: dataclasses.Field[Any]) -> object:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _as_yaml(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, tuple):
        return f"[{', '.join(map(_as_yaml, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_as_yaml(one)}' for key, one in value.items())}}}"
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
