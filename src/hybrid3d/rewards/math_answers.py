"""Implements the reward `math`: 1 if math-verify and sympy find answer and reference mathematically equal."""

from __future__ import annotations

import logging
from typing import Any

from math_verify import parse, verify

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limits are off, which is intended


def math(answer: str, reference: str, prompt: str = "") -> float:
    r"""Return 1.0 if the answer's final expression equals the reference's, else 0.0, also if the answer has none.

    The final expression is in the last `\boxed{}`, or after the last `####`; without either it is what math-verify
    extracts, usually the last expression of the text. Decimals are compared to 6 places. The library's time limits need
    the main thread and are switched off. Since sympy may not terminate, call this function through `Scorer`.

    Raises:
        ValueError: the reference has no mathematical expression.
    """
    expected = _expressions(_reference_text(reference))
    if not expected:
        raise ValueError(f"the reference has no mathematical expression: {reference[:80]!r}")
    final = final_text(answer)
    found = _expressions(answer if final is None else f"${final}$")
    return float(verify(expected, found, timeout_seconds=None))


def final_text(text: str) -> str | None:
    r"""Return the content of the last `\boxed{}`, else the text after the last `####`; None if there is neither."""
    start = text.rfind(r"\boxed{")
    if start >= 0:
        return _inside_braces(text, start + len(r"\boxed{"))
    _, marker, tail = text.rpartition("####")
    return tail.strip() if marker else None


def _inside_braces(text: str, start: int) -> str:
    """Return the text from `start` to the closing brace; "" if there is none, as in a truncated answer."""
    depth = 1
    for index in range(start, len(text)):
        if text[index] in "{}" and text[index - 1] != "\\":
            depth += 1 if text[index] == "{" else -1
        if depth == 0:
            return text[start:index]
    return ""


def _reference_text(reference: str) -> str:
    """Return the formula of a reference, which may be a whole solution or a bare formula, between dollar signs."""
    final = final_text(reference)
    return f"${reference.strip() if final is None else final}$".replace("$$", "$")


def _expressions(text: str) -> list[Any]:
    return list(parse(text, parsing_timeout=None))
