"""Implements the reward `math`: 1 if math-verify and sympy find answer and reference mathematically equal."""

from __future__ import annotations

import logging
from typing import Any

from math_verify import parse, verify

from hybrid3d.rewards.final_answers import final_text

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


def _reference_text(reference: str) -> str:
    """Return the formula of a reference, which may be a whole solution or a bare formula, between dollar signs."""
    final = final_text(reference)
    return f"${reference.strip() if final is None else final}$".replace("$$", "$")


def _expressions(text: str) -> list[Any]:
    return list(parse(text, parsing_timeout=None))
