"""A rule about settings that have no effect under a condition."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hybrid3d.config.refusals import Kind

if TYPE_CHECKING:
    from hybrid3d.config.recipe import Recipe


@dataclass(frozen=True)
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
