"""Records of refused combinations of settings: what is refused, and whether it could be otherwise.

Rule functions yield a record for each problem of a recipe. The number of combinations that could be built and are not
only falls (`tests/config/test_refusals.py`).

Conditions under which settings have an effect stand at the settings; a setting without an effect is refused, so that
users do not rely on what is not read. A setting at its default is never refused, because a resolved recipe lists all
settings. Neither is one that a step of the recipe's schedule makes effective. The recipe is not imported: it has the
sections, which have the conditions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

from hybrid3d.config.schema import join_keys, key_of

T = TypeVar("T")

MEGATRON = "megatron-core >=0.16.1,<0.20"
TRANSFORMER_ENGINE = "transformer-engine >=2.9,<2.21"
VLLM = "vllm >=0.31,<0.34"

Kind = Literal["arithmetic", "engine", "definition", "not_built"]
"""Why settings are refused:

- `arithmetic`: numbers do not divide or exceed each other, or mathematics gives them no meaning together;
- `engine`: no version of an engine in hybrid3d's range can do it;
- `definition`: a setting contradicts the other one, or has no effect or no meaning with it;
- `not_built`: it could be built, and is not.
"""


@dataclass(frozen=True)
class Refusal:
    """A problem of a recipe.

    Attributes:
        message: what is wrong, with the values.
        settings: of a layout, the settings for which valid values are suggested, or keys of the model's `config.json`,
            separated by spaces.
        fix: of a layout, the suggestion, if it is not a value of `settings` that can be searched for.
        engine: the engine and its range of versions, of the kind `engine`.
        why: what stands in the way, of the kind `not_built`.
    """

    kind: Kind
    message: str
    settings: str = ""
    fix: str = ""
    engine: str = ""
    why: str = ""

    def __post_init__(self) -> None:
        assert (self.kind == "engine") == bool(self.engine), "an engine's limit names the engine, and no other does"
        assert (self.kind == "not_built") == bool(self.why), "what is not built has a reason, and no other has"

    @property
    def keys(self) -> list[str]:
        return self.settings.split()


arithmetic = partial(Refusal, "arithmetic")
definition = partial(Refusal, "definition")


def not_built(why: str, message: str, settings: str = "", fix: str = "") -> Refusal:
    return Refusal("not_built", message, settings, fix, why=why)


def by_engine(engine: str, message: str, settings: str = "", fix: str = "") -> Refusal:
    return Refusal("engine", message, settings, fix, engine)


ONLY_IF = "only if"
"""Metadata key of a field: its conditions, of which the first that is not met is told."""

# Rewards and environments that are computed in the rank's own process, without workers that could fail: see `REWARDS`
# and `ENVIRONMENTS` in scoring/
IN_PROCESS = {"gsm8k", "calculator"}


@dataclass(frozen=True)
class OnlyIf:
    """A condition under which a setting has an effect.

    Attributes:
        is_met: of a recipe and the setting's section.
        otherwise: why the setting has no effect; `{recipe}`, `{own}`, its section, and `{path}`, the name of
            this, are filled in.
        decided_by: settings that decide on it, and that a schedule may change.
        kind: why it has none.
        why: see `Refusal`.
    """

    is_met: Callable[[Any, Any], bool]
    otherwise: str
    decided_by: tuple[str, ...] = ()
    kind: Kind = "definition"
    why: str = ""


def only_if(default: T, *conditions: OnlyIf) -> T:
    """Return the field of a setting with a default, and the conditions under which it has an effect."""
    return dataclasses.field(default=default, metadata={ONLY_IF: conditions})


def of_own(is_met: Callable[[Any], bool], otherwise: str, *decided_by: str) -> OnlyIf:
    """Return a condition that the setting's own section decides on."""
    return OnlyIf(lambda _, own: is_met(own), otherwise, decided_by)


def of_recipe(is_met: Callable[[Any], bool], otherwise: str, not_built: str = "") -> OnlyIf:
    """Return a condition that other sections decide on; `not_built` is why, where it could be met by building it."""
    kind: Kind = "not_built" if not_built else "definition"
    return OnlyIf(lambda recipe, _: is_met(recipe), otherwise, kind=kind, why=not_built)


def of_sampling(what: str) -> OnlyIf:
    """Return the condition that training samples answers; `sft` and `dpo` are told `what` they do instead."""
    return of_recipe(lambda recipe: recipe.algorithm.generates, f"algorithm.name={{recipe.algorithm.name}} {what}")


def of_answers(what: str) -> OnlyIf:
    """Return the condition that a run answers problems, at least held-out ones."""
    return of_recipe(
        lambda recipe: recipe.algorithm.generates or recipe.rollout is not None,
        f"algorithm.name={{recipe.algorithm.name}} without `rollout` {what}",
    )


def of_pairs(what: str) -> OnlyIf:
    """Return the condition that training is on preference pairs."""
    return of_recipe(lambda recipe: recipe.algorithm.uses_pairs, f"algorithm.name={{recipe.algorithm.name}} {what}")


def of_loss(*kinds: str) -> OnlyIf:
    """Return the condition that the policy loss is one of these."""
    return of_recipe(
        lambda recipe: recipe.algorithm.generates and recipe.algorithm.combination.policy_loss in kinds,
        "algorithm.policy_loss={recipe.algorithm.combination.policy_loss} does not use it",
    )


def unused_settings(recipe: Any) -> Iterator[Refusal]:
    """Yield a record of each setting of a recipe that is not at its default and has no effect."""
    scheduled = {key for settings in recipe.schedule.values() for key in settings}
    yield from _unused_in(recipe, recipe, None, "", scheduled)


def _unused_in(recipe: Any, own: Any, defaults: Any, path: str, scheduled: Set[str]) -> Iterator[Refusal]:
    """Yield those of a section; `defaults` is the section where a recipe leaves it out, None if it may not."""
    for field in dataclasses.fields(own):
        key, value = join_keys(path, key_of(field.name)), getattr(own, field.name)
        if dataclasses.is_dataclass(value):
            yield from _unused_in(recipe, value, field.default, key, scheduled)
        for condition in field.metadata.get(ONLY_IF, ()):
            if scheduled.isdisjoint(condition.decided_by) and not condition.is_met(recipe, own):
                usual = _default(field, defaults)
                if value != usual:
                    why = condition.otherwise.format(recipe=recipe, own=own, path=path)
                    problem = f"{key}={_as_yaml(value)} has no effect: {why}"
                    message = f"{problem}: leave it out, or set it to {_as_yaml(usual)}"
                    yield Refusal(condition.kind, message, why=condition.why)
                break


def _default(field: dataclasses.Field[Any], defaults: Any) -> object:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return getattr(defaults, field.name) if field.default is dataclasses.MISSING else field.default


def _as_yaml(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, tuple):
        return f"[{', '.join(map(_as_yaml, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_as_yaml(one)}' for key, one in value.items())}}}"
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
