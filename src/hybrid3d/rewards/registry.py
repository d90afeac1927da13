"""Rewards by name: functions of the model's answer, the data set's reference and the prompt, all text."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

_NUMBER = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)")
_TARGET = re.compile(r"\w+(\.\w+)*:\w+")


@dataclass(frozen=True)
class Reward:
    """Where a reward is defined, as `module:function`, and whether it needs the process pool.

    One that needs none is cheap, raises nothing and ends whatever the answer is. `check` names a function that raises
    ValueError at a reference which could reward no answer, or any; it takes about a millisecond and runs nothing of it.
    """

    target: str
    pooled: bool = True
    check: str = ""


REWARDS = {
    "gsm8k": Reward("hybrid3d.rewards.registry:gsm8k", pooled=False),
    "math": Reward("hybrid3d.rewards.math_answers:math"),
    "code": Reward("hybrid3d.rewards.code:code", check="hybrid3d.rewards.code_references:check_reference"),
}


def find_reward(spec: str) -> Reward:
    """The reward of a name in the table, or a user's own by `module:function`. ValueError: it is neither."""
    return REWARDS[spec] if spec in REWARDS else Reward(check_target(spec, REWARDS, "reward"))


def check_target(spec: str, known: Iterable[str], what: str) -> str:
    """The same, if it is a user's own `module:function`. ValueError: it is not; names those that are known."""
    if not _TARGET.fullmatch(spec):
        names = ", ".join(sorted(known))
        raise ValueError(f"unknown {what} {spec!r}; known: {names}, or a function of your own as module:function")
    return spec


def load_function(target: str) -> Callable[..., Any]:
    """The function `module:function`, its module looked for in the working directory too. Runs the module's code."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    module, _, name = target.partition(":")
    function = getattr(importlib.import_module(module), name)
    if not callable(function):
        raise TypeError(f"{target} is {type(function).__name__}, expected a function")
    return function  # type: ignore[no-any-return]  # what a call returns is checked where it is called


def check_references(spec: str, references: Iterable[tuple[int, str]]) -> dict[int, str]:
    """Rows whose reference the reward cannot judge by, and why. Of rewards that have no check there are none."""
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
    """1.0 where the numbers after the last `####` of answer and reference are equal, else 0.0; also where one has none.

    The marker is the data set's own (arXiv 2110.14168); a reference that is one word needs none. Numbers compare by
    value: 1234, 1,234.0 and $1,234. are equal.
    """
    marked = reference if len(reference.split()) != 1 else f"#### {reference}"
    given, wanted = _final_number(answer), _final_number(marked)
    return float(given is not None and given == wanted)


def overlong_penalty(tokens: int, max_tokens: int, buffer: int) -> float:
    """0, and within the last `buffer` tokens that an answer may have falling to -1 (arXiv 2503.14476, equation 13)."""
    return -min(1.0, max(0, tokens - (max_tokens - buffer)) / buffer)


def _final_number(text: str) -> Decimal | None:
    """The word after the last `####` as a number. Decimal, because equality of floats would forgive the 17th digit."""
    _, marker, tail = text.rpartition("####")
    words = tail.replace("$", "").split()
    if not marker or not words:
        return None
    word = words[0].replace(",", "").rstrip(".")
    return Decimal(word) if _NUMBER.fullmatch(word) else None
