"""Reads numbers and formulas with what stands beside them: words, currencies, units, signs of degrees and percent."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import sympy

from hybrid3d.scoring.math.expressions import DEGREE, PERCENT, ExpressionReader, checked
from hybrid3d.scoring.math.kinds import Expression
from hybrid3d.scoring.math.latex_tokens import (
    FILLERS,
    LETTER_UNITS,
    NOT_UNITS,
    NUMBER_WORDS,
    ORDINALS,
    Token,
    Unreadable,
    canonical_unit,
    literal,
)


def read_quantity(tokens: list[Token]) -> Expression:
    """Read a number or a formula with words before it and a unit behind it."""
    start = 0
    while start < len(tokens) - 1 and tokens[start].kind == "word" and tokens[start].text.lower() in FILLERS:
        start += 1
    if start < len(tokens) and tokens[start].text == ":" and start:
        start += 1
    tokens = tokens[start:]
    currency = ""
    signs = [token.text for token in tokens[:2]]
    if "$" in signs and (signs[0] == "$" or signs[0] in ("-", "+")):
        currency = "dollar"
        tokens = [token for place, token in enumerate(tokens) if place != signs.index("$")]
    elif tokens and tokens[0].kind == "word" and tokens[0].text in ("euro", "pound"):
        currency, tokens = tokens[0].text, tokens[1:]
    reader = ExpressionReader(tokens)
    value, rest = reader.read(), reader.rest
    value, unit, is_percent = _signs(value)
    scale, words = _unit_words(rest)
    names = [name for name in (unit, canonical_unit(words), currency) if name]
    if currency and names[0] != currency and len(names) > 1:
        raise Unreadable("a price with another unit")
    return Expression(
        checked(value * scale), " ".join(dict.fromkeys(names)), is_percent, _places(tokens, rest), _plain_word(tokens)
    )


def _signs(value: Any) -> tuple[Any, str, bool]:
    """Return a value without degree and percent signs, which may be factors of the whole alone."""
    for sign in (DEGREE, PERCENT):
        if value.has(sign):
            without = _without(sign, value)
            if without.has(DEGREE, PERCENT):
                raise Unreadable("signs of degrees and percent")
            return without, "degree" if sign == DEGREE else "", sign == PERCENT
    return value, "", False


def _without(sign: Any, value: Any) -> Any:
    """Return a value without a sign that is a factor of it, or of each of its terms."""
    if value == sign:
        return sympy.Integer(1)
    if value.is_Add:
        return sympy.Add(*(_without(sign, term) for term in value.args))
    if value.is_Mul and len(signed := [factor for factor in value.args if factor.has(sign)]) == 1:
        return sympy.Mul(*(_without(sign, part) if part == signed[0] else part for part in value.args))
    raise Unreadable("a sign of degrees or percent within a formula")


def _unit_words(tokens: Sequence[Token]) -> tuple[int, list[str]]:
    """Return the number that words behind a value multiply it by, and those of its unit. Unreadable: they are none."""
    scale, words = 1, list[str]()
    if tokens and tokens[0].text == "^":  # 4^{\text{th}}
        tokens = [token for token in tokens[1:] if token.text not in ("{", "}")]
        if "".join(token.text for token in tokens) not in ORDINALS:
            raise Unreadable("a power that is a text")
        return 1, []
    for place, token in enumerate(tokens):
        lower = token.text.lower()
        if token.kind == "word" and lower in NUMBER_WORDS and not words:
            scale *= NUMBER_WORDS[lower]
        elif token.kind == "word" and lower in ORDINALS and place == 0:
            continue
        elif token.kind == "word" and lower not in NOT_UNITS and (len(lower) > 1 or token.text in LETTER_UNITS):
            words.append(token.text)
        elif words and (exponent := _exponent(tokens, place)):
            words.append(exponent)
        elif words and token.text in ("/", "*", "frac") and place < len(tokens) - 1:
            words.append(token.text)
        elif not (words and token.text in ("{", "}", "^", "(", ")", ".") and token.kind != "command") and not (
            words and token.kind == "number" and _is_exponent(tokens, place)
        ):
            raise Unreadable(f"{token.text!r} behind a value is no unit")
    return scale, words


def _exponent(tokens: Sequence[Token], place: int) -> str:
    """Return the exponent of a unit whose `^` stands at this place, as `^2`; "" if none does."""
    if tokens[place].text != "^":
        return ""
    found = re.match(r"\^\{?(-?\d)\}?", literal(tokens[place:]))
    return f"^{found[1]}" if found else ""


def _is_exponent(tokens: Sequence[Token], place: int) -> bool:
    return "^" in (token.text for token in tokens[max(0, place - 3) : place])


def _places(tokens: Sequence[Token], rest: Sequence[Token]) -> int | None:
    """Return the decimal places of a number that is a decimal, with a sign or without."""
    signs = {"-", "+", "%"}
    plain = [token for token in tokens[: len(tokens) - len(rest)] if token.text not in signs]
    if len(plain) != 1 or plain[0].kind != "number" or "." not in plain[0].text:
        return None
    return len(plain[0].text.partition(".")[2])


def _plain_word(tokens: Sequence[Token]) -> str:
    """Return the letters of a formula that has nothing else, parentheses aside."""
    letters = [token for token in tokens if token.text not in ("(", ")")]
    if not all(token.kind in ("letter", "word") for token in letters):
        return ""
    text = "".join(token.text for token in letters)
    return text if len(text) == 1 else text.lower()
