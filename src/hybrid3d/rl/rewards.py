"""Rewards by name: a function of the model's answer and the data set's reference, both text."""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal

RewardFunction = Callable[[str, str], float]

_NUMBER = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)")


def gsm8k(answer: str, reference: str) -> float:
    """1.0 where the numbers after the last `####` of answer and reference are equal, else 0.0; also where one has none.

    The marker is the data set's own (arXiv 2110.14168). Numbers compare by value: 1234, 1,234.0 and $1,234. are equal.
    """
    given, wanted = _final_number(answer), _final_number(reference)
    return float(given is not None and given == wanted)


def overlong_penalty(tokens: int, longest: int, buffer: int) -> float:
    """0, and within the last `buffer` tokens that an answer may have falling to -1 (arXiv 2503.14476, equation 13)."""
    return -min(1.0, max(0, tokens - (longest - buffer)) / buffer)


def _final_number(text: str) -> Decimal | None:
    """The word after the last `####` as a number. Decimal, because equality of floats would forgive the 17th digit."""
    _, marker, tail = text.rpartition("####")
    words = tail.replace("$", "").split()
    if not marker or not words:
        return None
    word = words[0].replace(",", "").rstrip(".")
    return Decimal(word) if _NUMBER.fullmatch(word) else None


REWARDS: dict[str, RewardFunction] = {"gsm8k": gsm8k}


def reward_function(name: str) -> RewardFunction:
    """The reward of that name, or ValueError naming those there are."""
    if name not in REWARDS:
        raise ValueError(f"unknown reward {name!r}; known: {', '.join(sorted(REWARDS))}")
    return REWARDS[name]
