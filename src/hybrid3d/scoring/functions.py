r"""Defines rewards: functions of the model's answer, the data set's reference and the prompt, all of them text.

The final answer of a text is the number after `####`, or the content of the last `\boxed{}`.
"""

from __future__ import annotations

import importlib
import math
import os
import re
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import groupby
from typing import Any

_NUMBER = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*")
_BRACE = re.compile(r"(?<!\\)[{}]")
_BETWEEN_BOXES = re.compile(r"(?:[\s$,;&]|\\[()\[\],; ]|\\\\|\\q?quad|\\text\s*\{\s*(?:and|or)\s*\}|\band\b|\bor\b)*")
_ANNOUNCED = re.compile(r"\banswer(?:\s+is)?\s*(?:[:=]|(?<=is))\s*", re.IGNORECASE)
_FINALLY_ANNOUNCED = re.compile(r"\bfinal\s+answer(?:\s+is)?\s*(?:[:=]|(?<=is))\s*", re.IGNORECASE)
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n")
_FORMULA = re.compile(r"\$\$(.+?)\$\$|\$(.+?)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_WORDS = re.compile(r"(?<![\\A-Za-z])(?!(?:and|or)\b)[A-Za-z]{2,}[^\d\\(\[{A-Za-z+-]*")
_MAX_LAST_LINE = 2000  # characters of an answer without a marker in which a formula is looked for


def final_number(text: str) -> Decimal | None:
    """Return the word after the last `####` as a Decimal, which compares all digits, or None if it is no number."""
    _, marker, tail = text.rpartition("####")
    words = tail.replace("$", "").split()
    if not marker or not words:
        return None
    word = words[0].replace(",", "").rstrip(".")
    return Decimal(word) if _NUMBER.fullmatch(word) else None


def final_text(text: str) -> str | None:
    r"""Return the content of the last `\boxed{}`, else the text after the last `####`; None if there is neither.

    `\fbox{}` is a box too. Boxes that only commas, "and" or "or" separate are one answer, joined by commas.
    """
    if boxes := list(_boxes(text)):
        first = _first_joined(text, [box[:2] for box in boxes])
        return ", ".join(content for content, _ in groupby(content for *_, content in boxes[first:]))
    _, marker, tail = text.rpartition("####")
    return tail.strip() if marker else None


def last_formula(text: str) -> str | None:
    """Return what an answer without a box and `####` gives as its answer; None if it has nothing of the kind.

    It is what follows "the answer is" in the last sentence that has these words, else the last formula between dollar
    signs of the last line, else what stands there after its last words. What stands beside it as an alternative, such
    as "4 or 5", belongs to it.
    """
    sentences = [sentence for sentence in _SENTENCE_END.split(text[-20 * _MAX_LAST_LINE :]) if sentence.strip()]
    for announcement in (_FINALLY_ANNOUNCED, _ANNOUNCED):
        for sentence in reversed(sentences):
            if found := announcement.search(sentence):
                return sentence[found.end() :].strip() or None
    if not sentences:
        return None
    line = sentences[-1][-_MAX_LAST_LINE:]
    if formulas := [found.span() for found in _FORMULA.finditer(line)]:
        return line[formulas[_first_joined(line, formulas)][0] : formulas[-1][1]]
    parts = [part.strip(" .,;:!?*_") for part in _WORDS.split(line)]
    return next((part for part in reversed(parts) if part), None)


def _first_joined(text: str, places: Sequence[tuple[int, int]]) -> int:
    """Return the number of the first of the last places that only commas, "and" or "or" separate."""
    first = len(places) - 1
    while first and _BETWEEN_BOXES.fullmatch(text, places[first - 1][1], places[first][0]):
        first -= 1
    return first


def _boxes(text: str) -> Iterator[tuple[int, int, str]]:
    """Yield start, end and content of each box that is not within another; "" if it is cut short or empty."""
    closings, end = closing_braces(text), 0
    for found in _BOX.finditer(text):
        if found.start() < end:
            continue
        start = found.end()
        if text[start : start + 1] == "{":
            content = text[start + 1 : closings.get(start, start)]  # without a closing brace it is cut short
            end = start + len(content) + 2
        else:  # TeX takes the next character, or the next command
            bare = re.compile(r"\\[A-Za-z]+|[A-Za-z0-9]").match(text, start)
            content, end = (bare.group(), bare.end()) if bare else ("", start)
        yield found.start(), end, content.strip()


def closing_braces(text: str) -> dict[int, int]:
    r"""Return where each brace that is closed closes, by where it opens; one after a backslash is no brace.

    So it is in `\\}` too, which is `\}` escaped twice, or a line's end.
    """
    closings, opened = dict[int, int](), list[int]()
    for brace in _BRACE.finditer(text):
        if brace.group() == "{":
            opened.append(brace.start())
        elif opened:
            closings[opened.pop()] = brace.start()
    return closings


def _final_formula(text: str) -> str | None:
    """Return the final text without white space, by which formulas are compared; None if it is empty."""
    found = final_text(text)
    return None if found is None else "".join(found.split()) or None


FINAL_ANSWERS: Mapping[str, Callable[[str], Hashable | None]] = {"gsm8k": final_number, "math": _final_formula}
"""How to extract what answers are compared by, for each reward whose answers have a final answer."""


LARGEST_REWARD = 1e30
"""The largest magnitude of a reward: training computes in float32, which holds sums of such numbers (up to 3.4e38)."""

_TARGET = re.compile(r"\w+(\.\w+)*:\w+")


@dataclass(frozen=True)
class Reward:
    """A reward and the check of its references, each a `module:function`.

    The check raises ValueError for a reference which every answer would pass, or none; it takes about a millisecond and
    does not run the reference. It is "" if there is none.
    """

    target: str
    pooled: bool = True  # whether it needs the process pool; if not, it is cheap, never raises and always terminates
    check: str = ""


REWARDS = {
    "gsm8k": Reward("hybrid3d.scoring.functions:gsm8k", pooled=False),
    "math": Reward("hybrid3d.scoring.math.answers:math", check="hybrid3d.scoring.math.answers:read_reference"),
    "code": Reward("hybrid3d.scoring.code.reward:code", check="hybrid3d.scoring.code.reward:check_reference"),
}


def find_reward(spec: str) -> Reward:
    """Return a builtin reward by name, or a user's by `module:function`. ValueError: it is neither."""
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
