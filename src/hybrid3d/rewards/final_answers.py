r"""Extracts the final answer of a text: the number after `####`, or the content of the last `\boxed{}`."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping
from decimal import Decimal

_NUMBER = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)")


def final_number(text: str) -> Decimal | None:
    """Return the word after the last `####` as a Decimal, which compares all digits, or None if it is no number."""
    _, marker, tail = text.rpartition("####")
    words = tail.replace("$", "").split()
    if not marker or not words:
        return None
    word = words[0].replace(",", "").rstrip(".")
    return Decimal(word) if _NUMBER.fullmatch(word) else None


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


def _final_formula(text: str) -> str | None:
    """Return the final text without white space, by which formulas are compared; None if it is empty."""
    found = final_text(text)
    return None if found is None else "".join(found.split()) or None


FINAL_ANSWERS: Mapping[str, Callable[[str], Hashable | None]] = {"gsm8k": final_number, "math": _final_formula}
"""How to extract what answers are compared by, for each reward whose answers have a final answer."""
