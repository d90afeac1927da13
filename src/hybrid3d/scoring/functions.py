"""Defines rewards: functions of the model's answer, the data set's reference and the prompt, all of them text."""

from __future__ import annotations

import importlib
import math
import os
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from hybrid3d.scoring.final_answers import final_number

LARGEST_REWARD = 1e30
"""The largest magnitude of a reward: training computes in float32, which holds sums of such numbers (up to 3.4e38)."""

_TARGET = re.compile(r"\w+(\.\w+)*:\w+")


@dataclass(frozen=True)
class Reward:
    """Describes a reward.

    Attributes:
        target: the function, as `module:function`.
        pooled: whether it needs the process pool. If false, it is cheap, never raises and always terminates.
        check: a function, as `module:function`, that raises ValueError for a reference which every answer would pass,
            or none; it takes about a millisecond and does not run the reference. "" if there is none.
    """

    target: str
    pooled: bool = True
    check: str = ""


REWARDS = {
    "gsm8k": Reward("hybrid3d.scoring.functions:gsm8k", pooled=False),
    "math": Reward("hybrid3d.scoring.math.answers:math", check="hybrid3d.scoring.math.answers:check_reference"),
    "code": Reward("hybrid3d.scoring.code.reward:code", check="hybrid3d.scoring.code.references:check_reference"),
}


def find_reward(spec: str) -> Reward:
    """Return a builtin reward by name, or a user's reward by `module:function`. ValueError: it is neither."""
    return REWARDS[spec] if spec in REWARDS else Reward(check_target(spec, REWARDS, "reward"))


def check_target(spec: str, known: Iterable[str], what: str) -> str:
    """Return `spec` if it has the form `module:function`. ValueError: it has not; lists the `known` names."""
    if not _TARGET.fullmatch(spec):
        names = ", ".join(sorted(known))
        raise ValueError(f"unknown {what} {spec!r}; known: {names}, or a function of your own as module:function")
    return spec


def load_function(target: str) -> Callable[..., Any]:
    """Import the function `module:function`; the module may also be in the working directory."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    module, _, name = target.partition(":")
    function = getattr(importlib.import_module(module), name)
    if not callable(function):
        raise TypeError(f"{target} is {type(function).__name__}, expected a function")
    return function  # type: ignore[no-any-return]  # callers check what a call returns


def check_references(spec: str, references: Iterable[tuple[int, str]]) -> dict[int, str]:
    """Return the rows whose reference the reward's `check` refuses, with the reason; empty if it has no check."""
    check = find_reward(spec).check
    if not check:
        return {}
    function, refused = load_function(check), dict[int, str]()
    for row, reference in references:
        try:
            function(reference)
        except ValueError as error:
            refused[row] = str(error)
    return refused


def gsm8k(answer: str, reference: str, prompt: str = "") -> float:
    """Return 1.0 if the numbers after the last `####` of answer and reference are equal, else 0.0.

    The reward is also 0.0 if one of them has no number. The marker is that of the data set (arXiv 2110.14168); a
    reference of one word needs none. Numbers are compared by value: 1234, 1,234.0 and $1,234. are equal.
    """
    marked = reference if len(reference.split()) != 1 else f"#### {reference}"
    number, expected = final_number(answer), final_number(marked)
    return float(number is not None and number == expected)


def unusable(value: float) -> str:
    """Return the kind of failure if a number can be no reward: `not_a_number`, also an infinite one, or `too_large`."""
    if not math.isfinite(value):
        return "not_a_number"
    return "too_large" if abs(value) > LARGEST_REWARD else ""


def overlong_penalty(tokens: int, max_tokens: int, buffer: int) -> float:
    """Return 0, or within the last `buffer` of `max_tokens` a linear decrease to -1 (arXiv 2503.14476, equation 13)."""
    return -min(1.0, max(0, tokens - (max_tokens - buffer)) / buffer)
