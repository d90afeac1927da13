"""Reward `math`: the answer equals the reference as mathematics, which math-verify and sympy decide."""

from __future__ import annotations

import logging
from typing import Any

from math_verify import parse, verify

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limits are off, as they are to be


def math(answer: str, reference: str, prompt: str = "") -> float:
    r"""1.0 where the answer's final expression equals that of the reference, else 0.0; also where it has none.

    The final expression is in the last `\boxed{}`, or after the last `####`; without either it is what math-verify
    finds in the text, the last mathematics as a rule. Decimals are compared to 6 places. The library's own time limits
    need a main thread and are switched off: sympy may take for ever, and this is to be called through `Scorer`.

    Raises:
        ValueError: there is nothing to compare with in the reference.
    """
    wanted = _expressions(_reference_text(reference))
    if not wanted:
        raise ValueError(f"the reference has no mathematics: {reference[:80]!r}")
    final = final_text(answer)
    given = _expressions(answer if final is None else f"${final}$")
    return float(verify(wanted, given, timeout_seconds=None))


def final_text(text: str) -> str | None:
    r"""What the last `\boxed{}` holds, or else what follows the last `####`; None where there is neither."""
    start = text.rfind(r"\boxed{")
    if start >= 0:
        return _inside_braces(text, start + len(r"\boxed{"))
    _, marker, tail = text.rpartition("####")
    return tail.strip() if marker else None


def _inside_braces(text: str, start: int) -> str:
    """From `start` to the brace that closes the one before it; nothing where none does, as in an answer cut short."""
    depth = 1
    for place in range(start, len(text)):
        if text[place] in "{}" and text[place - 1] != "\\":
            depth += 1 if text[place] == "{" else -1
        if depth == 0:
            return text[start:place]
    return ""


def _reference_text(reference: str) -> str:
    """A data set's reference may be a whole solution, or a bare formula."""
    final = final_text(reference)
    return f"${reference.strip() if final is None else final}$".replace("$$", "$")


def _expressions(text: str) -> list[Any]:
    return list(parse(text, parsing_timeout=None))
